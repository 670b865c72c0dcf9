// aio::Engine: asynchronous reads and writes between files and memory.
//
// Words
//   A request is one read or write of any size. It is cut into blocks; at most
//   `depth` blocks are under way at a time, of all requests together. Requests
//   of one kind begin in the order of their submission; while reads and writes
//   both wait, they take turns block by block, so that neither starves.
//   A file is opened twice: direct (O_DIRECT: the device reads and writes the
//   caller's memory, no copy) and plain (through the page cache). Blocks whose
//   offset, address and size are multiples of kAlign go direct. What is left of
//   a request goes plain: a head or a tail of less than kAlign bytes, or all of
//   it where (address - offset) is not a multiple of kAlign. A direct block
//   covers whole pages, and the kernel brings a page's cached bytes to the disk
//   before it reads or writes the page directly, so the two ways see each
//   other's completed requests.
//
// Order      Requests are not ordered among themselves: wait for a write before
//            its bytes are read, and for a read before its memory is used.
// Ownership  Memory of a request belongs to the caller and must stay until the
//            request is done; so must registered memory until it is forgotten.
//            A request holds its file. The engine owns its threads, and knows
//            the files opened through it: close() closes them.
// Blocking   open (may allocate space on disk), writes_done, settle, sync,
//            close_file, close, and Request::wait. read and write never wait for a file.
// Threads    Every method may be called from any thread.
// Fork       A child has no threads of its parent: there every method fails,
//            and destructors let go without touching anything.
// Failure    The first failed block fails its request, which is done when none
//            of its blocks is under way any more. Other requests go on.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "zero/aio/file.h"
#include "zero/aio/request.h"
#include "zero/aio/storage.h"
#include "zero/status.h"

namespace zero::aio {

struct Options {
  int64_t block_bytes = int64_t{4} << 20;  // a multiple of kAlign, at most 1 GiB
  int depth = 16;
};

struct Counters {
  int64_t reads = 0;  // requests done, failed ones too
  int64_t writes = 0;
  int64_t bytes_read = 0;
  int64_t bytes_written = 0;
  int64_t bytes_cached = 0;  // of these, bytes that went through the page cache
  int64_t short_transfers = 0;  // blocks that the storage moved in parts
  int64_t in_flight = 0;  // blocks, now
};

class Engine {
 public:
  // `storage` must not be started.
  static Result<std::unique_ptr<Engine>> create(
      std::unique_ptr<Storage> storage,
      Options options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  Result<FilePtr> open(const std::string& path, int64_t nbytes, OpenOptions options);
  // Waits for the file's requests, then closes it. Idempotent.
  Status close_file(const FilePtr& file);

  // `held` is let go of when the request is done, on a thread of the storage and
  // under the engine's lock.
  Result<RequestPtr> read(
      FilePtr file,
      void* data,
      int64_t size,
      int64_t offset,
      std::string label,
      std::shared_ptr<void> held = {});
  Result<RequestPtr> write(
      FilePtr file,
      const void* data,
      int64_t size,
      int64_t offset,
      std::string label,
      std::shared_ptr<void> held = {});

  // Waits at most that long; whether none of the file's writes is under way.
  Result<bool> writes_done(const FilePtr& file, int milliseconds);
  // Waits until no request is waiting or under way, whatever becomes of each.
  Status settle();
  // Waits for writes under way, then for the device (fdatasync). The failure is
  // that of a write that nobody has waited for, else that of the device.
  Status sync(const FilePtr& file);

  // Whether the storage could register it; requests inside it are then cheaper.
  Result<bool> register_memory(void* data, int64_t size);
  Status forget_memory(void* data, int64_t size);

  Counters counters() const;

  // Cancels what has not begun, waits for blocks under way, ends the threads
  // and closes the files. Later calls fail. Idempotent.
  void close();

 private:
  // A transfer under way.
  struct Block : Transfer {
    RequestPtr request;
    int retries = 0;
  };
  struct Memory {
    char* begin = nullptr;
    int64_t size = 0;
    int number = -1;
  };

  Engine(std::unique_ptr<Storage> storage, Options options);

  Status usable() const;
  Result<RequestPtr> submit(
      bool write,
      FilePtr file,
      char* data,
      int64_t size,
      int64_t offset,
      std::string label,
      std::shared_ptr<void> held);
  // The following hold the lock.
  void pump();
  void cut(Request& request, Block& block);
  void use_plain(Block& block);
  // What to do with a result: true if the rest of the block was submitted again.
  bool go_on(Block& block, int64_t result);
  void fail(Request& request, int error, int64_t at, const std::string& reason);
  void finish_if_done(const RequestPtr& request);
  int memory_of(const char* data, int64_t size) const;

  void on_done(Transfer& transfer, int64_t result);

  const pid_t pid_;
  const Options options_;
  std::shared_ptr<Shared> shared_;  // its lock guards all that follows
  std::unique_ptr<Storage> storage_;
  bool closed_ = false;
  bool write_next_ = false;
  int syncing_ = 0;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Block*> free_;
  std::deque<RequestPtr> waiting_[2];  // reads, writes
  std::vector<Memory> memory_;
  std::vector<std::weak_ptr<File>> files_;
  Counters counters_;
};

}  // namespace zero::aio
