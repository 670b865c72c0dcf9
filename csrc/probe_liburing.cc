// Compiles and links where liburing is there and new enough (2.2): setup.py and
// the Makefile here try it.
#include <liburing.h>

int main() {
  io_uring ring;
  return io_uring_register_files_sparse(&ring, 1) + io_uring_register_buffers_sparse(&ring, 1) +
      io_uring_register_buffers_update_tag(&ring, 0, nullptr, nullptr, 0) +
      IORING_SETUP_COOP_TASKRUN;
}
