// Engines of file I/O over a storage that fails on demand, or over the real
// ones; folders for their files and memory to read and write.
#pragma once

#include <stdlib.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "fake_storage.h"
#include "zero/aio/engine.h"

namespace zero::test {

using aio::Engine;
using aio::FilePtr;
using aio::kAlign;
using aio::Options;
using aio::RequestPtr;
using aio::Storage;

constexpr int kSoon = 20'000;  // milliseconds

// A folder on a disk that is gone at the end.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::current_path() / "aio-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) {
      throw std::runtime_error("no folder could be made: " + name);
    }
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const char* name) const {
    return path_ + "/" + name;
  }

 private:
  std::string path_;
};

// Memory that begins `shift` bytes after a multiple of kAlign.
class Memory {
 public:
  explicit Memory(int64_t size, int64_t shift = 0, int seed = 0)
      : data_(static_cast<char*>(std::aligned_alloc(
            kAlign,
            static_cast<size_t>((size + shift + kAlign) / kAlign * kAlign)))),
        shift_(shift),
        size_(size) {
    std::minstd_rand numbers(static_cast<unsigned>(seed) + 1);
    for (int64_t i = 0; i < size; ++i) {
      get()[i] = static_cast<char>(numbers());
    }
  }
  ~Memory() {
    std::free(data_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* get() const {
    return data_ + shift_;
  }
  std::string text() const {
    return {get(), static_cast<size_t>(size_)};
  }

 private:
  char* const data_;
  const int64_t shift_;
  const int64_t size_;
};

inline Status outcome(const RequestPtr& request) {
  if (!value_of(request->wait(kSoon))) {
    return Status::error("not done in time");
  }
  const auto failure = request->failure();
  return failure == nullptr ? Status() : failure->status;
}

inline Status outcome(Result<RequestPtr> request) {
  ZERO_RETURN_IF_ERROR(request.status());
  return outcome(request.value());
}

struct Fake {
  explicit Fake(int64_t nbytes, Options options = {.block_bytes = 8192, .depth = 3}, int threads = 2) {
    state->bytes.resize(static_cast<size_t>(nbytes));
    engine = value_of(Engine::create(std::make_unique<FakeStorage>(state, threads), options));
    file = value_of(engine->open(
        folder / "fake", nbytes, {.create = true, .direct = true, .label = "layers.0.wq"}));
  }
  void hold(bool held) const {
    {
      const std::lock_guard lock(state->mutex);
      state->held = held;
    }
    state->changed.notify_all();
  }

  Folder folder;
  std::shared_ptr<FakeStorage::State> state = std::make_shared<FakeStorage::State>();
  std::unique_ptr<Engine> engine;
  FilePtr file;
};

using Make = Result<std::unique_ptr<Storage>> (*)(int);

inline std::vector<Make> real_storages() {
  std::vector<Make> all = {&aio::make_thread_storage};
  if (aio::make_uring_storage(4).ok()) {
    all.push_back([](int depth) { return aio::make_uring_storage(depth); });
  }
  return all;
}

}  // namespace zero::test
