#include "zero/aio/storage.h"

#include <unistd.h>

#include <cerrno>

namespace zero::aio {

int Storage::sync(int fd) {
  int outcome = 0;
  do {
    outcome = ::fdatasync(fd);
  } while (outcome != 0 && errno == EINTR);
  return outcome == 0 ? 0 : -errno;
}

Status Storage::trouble() {
  return {};
}

int Storage::register_file(int) {
  return -1;
}
void Storage::forget_file(int) {}

int Storage::register_memory(char*, int64_t) {
  return -1;
}
void Storage::forget_memory(int) {}

}  // namespace zero::aio
