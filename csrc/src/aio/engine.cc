#include "zero/aio/engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <utility>

#include "reason.h"

namespace zero::aio {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;
constexpr int kMaxDepth = 1024;
constexpr int kMaxRetries = 100;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

uint64_t misaligned(const char* data) {
  return reinterpret_cast<uintptr_t>(data) % kAlign;
}

}  // namespace

Result<std::unique_ptr<Engine>> Engine::create(
    std::unique_ptr<Storage> storage,
    Options options) {
  if (options.block_bytes < kAlign || options.block_bytes > kGiB ||
      options.block_bytes % kAlign != 0) {
    return Status::error(
        "block_bytes must be a multiple of 4096, at most 1 GiB, not " +
        std::to_string(options.block_bytes));
  }
  if (options.depth < 1 || options.depth > kMaxDepth) {
    return Status::error(
        "depth must be between 1 and 1024, not " + std::to_string(options.depth));
  }
  return std::unique_ptr<Engine>(new Engine(std::move(storage), options));
}

Engine::Engine(std::unique_ptr<Storage> storage, Options options)
    : pid_(::getpid()),
      options_(options),
      shared_(std::make_shared<Shared>()),
      storage_(std::move(storage)) {
  for (int i = 0; i < options.depth; ++i) {
    blocks_.push_back(std::make_unique<Block>());
    free_.push_back(blocks_.back().get());
  }
  storage_->start(
      [this](Transfer& transfer, int64_t result) { on_done(transfer, result); });
}

Engine::~Engine() {
  if (::getpid() != pid_) {
    // The threads are in the parent; their locks may be held for ever here. What
    // they use stays, until this process ends.
    (void)storage_.release();
    (void)new std::shared_ptr<Shared>(shared_);
    return;
  }
  close();
}

Status Engine::usable() const {
  if (::getpid() != pid_) {
    return Status::error(
        "this Engine belongs to process " + std::to_string(pid_) +
        ", and this is a forked child: make an Engine of its own here");
  }
  return {};
}

Result<FilePtr> Engine::open(
    const std::string& path,
    int64_t nbytes,
    OpenOptions options) {
  ZERO_RETURN_IF_ERROR(usable());
  const auto refused = [&] {
    return Status::error(
        "'" + (options.name.empty() ? path : options.name) + "'" +
        (options.label.empty() ? "" : " (" + options.label + ")") +
        " could not be opened: the I/O engine is closed");
  };
  {
    const std::lock_guard lock(shared_->mutex);
    if (closed_) {
      return refused();  // before a file is made
    }
  }
  auto opened = File::open(path, nbytes, options);
  ZERO_RETURN_IF_ERROR(opened.status());
  const FilePtr file = opened.value();
  const std::lock_guard lock(shared_->mutex);
  if (closed_) {  // meanwhile
    if (options.create) {
      (void)::unlink(path.c_str());
    }
    return refused();
  }
  std::erase_if(files_, [](const auto& known) { return known.expired(); });
  files_.push_back(file);
  file->plain_number_ = storage_->register_file(file->plain_.get());
  if (file->direct()) {
    file->direct_number_ = storage_->register_file(file->direct_fd_.get());
  }
  return file;
}

Status Engine::close_file(const FilePtr& file) {
  ZERO_RETURN_IF_ERROR(usable());
  std::unique_lock lock(shared_->mutex);
  shared_->changed.wait(lock, [&] {
    return file->pending_[0] + file->pending_[1] + file->syncing_ == 0;
  });
  if (!file->closed_) {
    file->closed_ = true;
    if (storage_ != nullptr) {
      storage_->forget_file(file->plain_number_);
      storage_->forget_file(file->direct_number_);
    }
    file->plain_.reset();
    file->direct_fd_.reset();
    file->failed_writes_.clear();
  }
  return {};
}

Result<RequestPtr> Engine::read(
    FilePtr file,
    void* data,
    int64_t size,
    int64_t offset,
    std::string label,
    std::shared_ptr<void> held) {
  return submit(
      false,
      std::move(file),
      static_cast<char*>(data),
      size,
      offset,
      std::move(label),
      std::move(held));
}

Result<RequestPtr> Engine::write(
    FilePtr file,
    const void* data,
    int64_t size,
    int64_t offset,
    std::string label,
    std::shared_ptr<void> held) {
  // A write only reads the memory; a Transfer serves both ways.
  return submit(
      true,
      std::move(file),
      static_cast<char*>(const_cast<void*>(data)),
      size,
      offset,
      std::move(label),
      std::move(held));
}

Result<RequestPtr> Engine::submit(
    bool write,
    FilePtr file,
    char* data,
    int64_t size,
    int64_t offset,
    std::string label,
    std::shared_ptr<void> held) {
  ZERO_RETURN_IF_ERROR(usable());
  if (label.empty()) {
    label = file->options_.label;
  }
  const auto refused = [&](const std::string& why) {
    return Status::error(
        std::string(write ? "write" : "read") + " of " + std::to_string(size) +
        " bytes at offset " + std::to_string(offset) + " of '" + file->name() + "'" +
        (label.empty() ? "" : " (" + label + ")") + " is not possible: " + why);
  };
  if (size < 0 || offset < 0 || size > file->nbytes() - offset) {
    return refused("the file has " + std::to_string(file->nbytes()) + " bytes");
  }
  if (write && !file->writable()) {
    return refused("the file could only be opened for reading");
  }
  const std::lock_guard lock(shared_->mutex);
  if (closed_) {
    return refused("the I/O engine is closed");
  }
  if (file->closed_) {
    return refused("the file is closed");
  }
  auto request = std::make_shared<Request>(
      shared_, file, write, data, size, offset, std::move(label));
  request->held_ = std::move(held);
  request->begin_ns_ = now_ns();
  ++file->pending_[write ? 1 : 0];
  if (size == 0) {
    finish_if_done(request);
  } else {
    waiting_[write ? 1 : 0].push_back(request);
    pump();
  }
  return request;
}

void Engine::pump() {
  while (!free_.empty() && !(waiting_[0].empty() && waiting_[1].empty())) {
    size_t kind = write_next_ ? 1 : 0;
    if (waiting_[kind].empty()) {
      kind = 1 - kind;
    }
    write_next_ = kind == 0;
    const RequestPtr request = waiting_[kind].front();
    Block& block = *free_.back();
    free_.pop_back();
    block.request = request;
    block.retries = 0;
    cut(*request, block);
    if (request->cut_ == request->size_) {
      waiting_[kind].pop_front();
    }
    if (request->cut_ == block.size) {
      request->begin_ns_ = now_ns();
    }
    ++request->in_flight_;
    ++counters_.in_flight;
    storage_->submit(block);
  }
}

// The next block: up to a page boundary, or whole pages, or what follows the
// last whole page.
void Engine::cut(Request& request, Block& block) {
  const File& file = *request.file_;
  block.write = request.write_;
  block.offset = request.offset_ + request.cut_;
  block.data = request.data_ + request.cut_;
  block.size = std::min(options_.block_bytes, request.size_ - request.cut_);
  const int64_t into_page = block.offset % kAlign;
  const bool congruent = misaligned(block.data) == static_cast<uint64_t>(into_page);
  if (!file.direct() || !congruent) {
    use_plain(block);
  } else if (into_page != 0) {
    block.size = std::min(block.size, kAlign - into_page);
    use_plain(block);
  } else if (block.size < kAlign) {
    use_plain(block);
  } else {
    block.size -= block.size % kAlign;
    block.cached = false;
    block.fd = file.direct_fd_.get();
    block.file = file.direct_number_;
  }
  block.memory = memory_of(block.data, block.size);
  request.cut_ += block.size;
}

void Engine::use_plain(Block& block) {
  block.cached = true;
  block.fd = block.request->file_->plain_.get();
  block.file = block.request->file_->plain_number_;
}

int Engine::memory_of(const char* data, int64_t size) const {
  for (const Memory& memory : memory_) {
    if (data >= memory.begin && data + size <= memory.begin + memory.size) {
      return memory.number;
    }
  }
  return -1;
}

void Engine::on_done(Transfer& transfer, int64_t result) {
  auto& block = static_cast<Block&>(transfer);
  const std::lock_guard lock(shared_->mutex);
  if (go_on(block, result)) {
    storage_->submit(block);
    return;
  }
  const RequestPtr request = std::move(block.request);
  free_.push_back(&block);
  --counters_.in_flight;
  --request->in_flight_;
  finish_if_done(request);
  pump();
  if (closed_) {
    shared_->changed.notify_all();
  }
}

bool Engine::go_on(Block& block, int64_t result) {
  Request& request = *block.request;
  File& file = *request.file_;
  if (result > 0) {
    (request.write_ ? counters_.bytes_written : counters_.bytes_read) += result;
    counters_.bytes_cached += block.cached ? result : 0;
    block.retries = 0;
    if (result >= block.size) {
      return false;
    }
    ++counters_.short_transfers;
    block.offset += result;
    block.data += result;
    block.size -= result;
    if (!block.cached &&
        (block.offset % kAlign != 0 || misaligned(block.data) != 0 || block.size % kAlign != 0)) {
      use_plain(block);
    }
    return request.failure_ == nullptr;  // nobody needs the rest of a failed one
  }
  if (result == kStorageFailed) {
    const Status trouble = storage_->trouble();
    fail(request, trouble.code(), block.offset, trouble.message());
    return false;
  }
  const int error = static_cast<int>(-result);
  if ((error == EINTR || error == EAGAIN) && ++block.retries <= kMaxRetries) {
    return true;
  }
  if (error == EINVAL && !block.cached) {
    // Some file systems take O_DIRECT at open and refuse it at a transfer.
    file.direct_.store(false, std::memory_order_relaxed);
    use_plain(block);
    return true;
  }
  if (error != 0) {
    fail(request, error, block.offset, reason_for(error));
  } else if (request.write_) {
    fail(request, EIO, block.offset, "the file system takes no more bytes");
  } else {
    fail(
        request,
        0,
        block.offset,
        "the file ends there and should have " + std::to_string(file.nbytes_) +
            " bytes: it was truncated");
  }
  return false;
}

void Engine::fail(Request& request, int error, int64_t at, const std::string& reason) {
  if (request.failure_ != nullptr) {
    return;
  }
  request.failure_ = std::make_shared<Failure>();
  request.failure_->at = at;
  request.failure_->status = Status::error(
      std::string(request.write_ ? "write" : "read") + " of " +
          std::to_string(request.size_) + " bytes at offset " +
          std::to_string(request.offset_) + " of '" + request.file_->name() + "'" +
          (request.label_.empty() ? "" : " (" + request.label_ + ")") +
          " failed at byte " + std::to_string(at) + ": " + reason,
      error);
  if (request.write_) {
    request.file_->failed_writes_.push_back(request.failure_);
  }
  // What has not begun is dropped.
  if (request.cut_ < request.size_) {
    request.cut_ = request.size_;
    std::erase_if(waiting_[request.write_ ? 1 : 0], [&](const RequestPtr& waiting) {
      return waiting.get() == &request;
    });
  }
}

void Engine::finish_if_done(const RequestPtr& request) {
  if (request->in_flight_ > 0 || request->cut_ < request->size_) {
    return;
  }
  ++(request->write_ ? counters_.writes : counters_.reads);
  --request->file_->pending_[request->write_ ? 1 : 0];
  request->end_ns_ = now_ns();
  request->held_.reset();
  request->done_.store(true, std::memory_order_release);
  shared_->changed.notify_all();
}

Result<bool> Engine::writes_done(const FilePtr& file, int milliseconds) {
  ZERO_RETURN_IF_ERROR(usable());
  std::unique_lock lock(shared_->mutex);
  return shared_->changed.wait_for(
      lock, std::chrono::milliseconds(milliseconds), [&] { return file->pending_[1] == 0; });
}

Status Engine::settle() {
  ZERO_RETURN_IF_ERROR(usable());
  std::unique_lock lock(shared_->mutex);
  shared_->changed.wait(lock, [&] {
    return waiting_[0].empty() && waiting_[1].empty() && counters_.in_flight == 0;
  });
  return {};
}

Status Engine::sync(const FilePtr& file) {
  ZERO_RETURN_IF_ERROR(usable());
  std::unique_lock lock(shared_->mutex);
  if (closed_ || file->closed_) {
    return Status::error(
        "flush of '" + file->name() + "' is not possible: the " +
        (closed_ ? "I/O engine" : "file") + " is closed");
  }
  ++syncing_;
  ++file->syncing_;
  shared_->changed.wait(lock, [&] { return file->pending_[1] == 0; });
  const int fd = file->plain_.get();
  lock.unlock();
  const int result = storage_->sync(fd);
  lock.lock();
  --syncing_;
  --file->syncing_;
  shared_->changed.notify_all();
  Status outcome;
  if (result < 0) {
    outcome = Status::error(
        "flush of '" + file->name() + "'" +
            (file->options_.label.empty() ? "" : " (" + file->options_.label + ")") +
            " failed: " + reason_for(-result),
        -result);
  }
  // The earliest write that nobody asked about comes first.
  for (auto one = file->failed_writes_.rbegin(); one != file->failed_writes_.rend(); ++one) {
    if (!std::exchange((*one)->known, true)) {
      outcome = (*one)->status;
    }
  }
  file->failed_writes_.clear();
  return outcome;
}

Result<bool> Engine::register_memory(void* data, int64_t size) {
  ZERO_RETURN_IF_ERROR(usable());
  const std::lock_guard lock(shared_->mutex);
  if (closed_) {
    return Status::error("the I/O engine is closed");
  }
  auto* begin = static_cast<char*>(data);
  bool all = size > 0;
  for (int64_t at = 0; at < size; at += kGiB) {
    const int64_t piece = std::min(kGiB, size - at);
    const int number = storage_->register_memory(begin + at, piece);
    if (number >= 0) {
      memory_.push_back({begin + at, piece, number});
    }
    all = all && number >= 0;
  }
  return all;
}

Status Engine::forget_memory(void* data, int64_t size) {
  ZERO_RETURN_IF_ERROR(usable());
  const std::lock_guard lock(shared_->mutex);
  if (closed_) {
    return {};  // gone with the storage
  }
  auto* begin = static_cast<char*>(data);
  std::erase_if(memory_, [&](const Memory& memory) {
    const bool inside = memory.begin >= begin && memory.begin < begin + size;
    if (inside) {
      storage_->forget_memory(memory.number);
    }
    return inside;
  });
  return {};
}

Counters Engine::counters() const {
  if (!usable().ok()) {
    return {};
  }
  const std::lock_guard lock(shared_->mutex);
  return counters_;
}

void Engine::close() {
  if (!usable().ok()) {
    return;
  }
  std::unique_lock lock(shared_->mutex);
  closed_ = true;
  for (auto& waiting : waiting_) {
    while (!waiting.empty()) {
      const RequestPtr request = waiting.front();
      const int64_t at = request->offset_ + request->cut_;
      fail(*request, ECANCELED, at, "the I/O engine was closed before it was done");
      finish_if_done(request);
    }
  }
  shared_->changed.wait(lock, [&] { return counters_.in_flight == 0 && syncing_ == 0; });
  const auto files = std::exchange(files_, {});
  lock.unlock();
  for (const auto& known : files) {
    if (const FilePtr file = known.lock()) {
      (void)close_file(file);
    }
  }
  lock.lock();
  memory_.clear();
  const std::unique_ptr<Storage> storage = std::move(storage_);
  lock.unlock();
  // Joins the threads, of which one may be on its way out of on_done: without
  // the lock.
}

}  // namespace zero::aio
