// Storage: moves blocks between open files and memory. It knows nothing of
// requests: the engine above cuts them into transfers and reads the results.
//
// Three kinds: a ring of the kernel (io_uring), a pool of threads that call
// pread and pwrite, and, in tests, one that fails on demand.
//
// Ownership  The caller owns transfers, files and memory; a transfer and its
//            memory must stay until `done` was called for it.
// Blocking   submit() never waits for a file. sync() does. The destructor waits
//            for every submitted transfer.
// Threads    Every method may be called from any thread, submit() also from
//            inside `done`. `done` runs on a thread of the storage, never inside
//            submit().
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>

#include "zero/status.h"

namespace zero::aio {

// One contiguous piece of a file and of memory.
struct Transfer {
  bool write = false;
  // Goes through the page cache, where the kernel may copy for a while before
  // it answers.
  bool cached = false;
  int fd = -1;
  int file = -1;  // number of the registered file, or -1
  int memory = -1;  // number of the registered memory that holds data, or -1
  int64_t offset = 0;  // in the file, bytes
  char* data = nullptr;
  int64_t size = 0;  // bytes; at most 1 GiB
};

// The result of a transfer that the storage could not even try, because it
// failed itself: Storage::trouble says how.
constexpr int64_t kStorageFailed = std::numeric_limits<int64_t>::min();

class Storage {
 public:
  // The bytes moved, which may be fewer than asked for, or -errno, or
  // kStorageFailed.
  using Done = std::function<void(Transfer&, int64_t result)>;

  virtual ~Storage() = default;
  virtual const char* name() const = 0;
  // Once, before the first submit().
  virtual void start(Done done) = 0;
  virtual void submit(Transfer& transfer) = 0;
  // Why this storage takes no transfers any more; ok for as long as it does.
  virtual Status trouble();
  // fdatasync: 0 or -errno.
  virtual int sync(int fd);

  // Makes later transfers a little cheaper. A number for Transfer::file or
  // Transfer::memory, or -1: not registered, which is no error. Registered
  // memory stays pinned, and a registered file open, until it is forgotten.
  virtual int register_file(int fd);
  virtual void forget_file(int number);
  virtual int register_memory(char* data, int64_t size);  // at most 1 GiB
  virtual void forget_memory(int number);
};

// Fails where threads cannot be made.
Result<std::unique_ptr<Storage>> make_thread_storage(int threads);

// `depth` transfers may be under way. Fails where the engine was built without
// liburing, or where the kernel or a sandbox refuses io_uring. The kernel may
// refuse transfers for want of memory for so long, and a ring that failed may
// keep those that it has for three times as long without ending any; then they
// fail.
Result<std::unique_ptr<Storage>> make_uring_storage(int depth, int patience_ms = 10'000);

}  // namespace zero::aio
