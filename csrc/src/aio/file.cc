#include "zero/aio/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "reason.h"
#include "zero/aio/request.h"

namespace zero::aio {
namespace {

int open_retrying(const std::string& path, int flags) {
  int fd = -1;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, S_IRUSR | S_IWUSR);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

}  // namespace

void UniqueFd::reset() {
  if (fd_ >= 0) {
    // What can fail at close was told by Engine::sync, for those who asked.
    (void)::close(std::exchange(fd_, -1));
  }
}

Result<std::shared_ptr<File>> File::open(
    const std::string& path,
    int64_t nbytes,
    OpenOptions options) {
  if (nbytes < 0) {
    return Status::error("a file has at least 0 bytes, not " + std::to_string(nbytes));
  }
  std::shared_ptr<File> file(new File(path, nbytes, std::move(options)));
  ZERO_RETURN_IF_ERROR(file->open_descriptors());
  return file;
}

Status File::open_descriptors() {
  const auto failed = [this](const std::string& what, int error) {
    const std::string of = options_.label.empty() ? "" : " (" + options_.label + ")";
    return Status::error(
        "'" + name() + "'" + of + " could not be " + what + ": " +
            reason_for(error),
        error);
  };
  int access = O_RDWR;
  if (options_.create) {
    plain_ = UniqueFd(open_retrying(path_, O_RDWR | O_CREAT | O_EXCL));
    if (plain_.get() < 0) {
      return failed("made", errno);
    }
    int error = 0;
    do {
      error = nbytes_ > 0 ? ::posix_fallocate(plain_.get(), 0, nbytes_) : 0;
    } while (error == EINTR);
    if (error != 0) {
      (void)::unlink(path_.c_str());
      return failed("given its " + std::to_string(nbytes_) + " bytes", error);
    }
  } else {
    plain_ = UniqueFd(open_retrying(path_, O_RDWR));
    if (plain_.get() < 0 && (errno == EACCES || errno == EROFS || errno == EPERM)) {
      writable_ = false;
      access = O_RDONLY;
      plain_ = UniqueFd(open_retrying(path_, O_RDONLY));
    }
    if (plain_.get() < 0) {
      return failed("opened", errno);
    }
  }
  struct stat found = {};
  if (::fstat(plain_.get(), &found) != 0) {
    return failed("looked at", errno);
  }
  if (!S_ISREG(found.st_mode)) {
    return Status::error("'" + name() + "' is not a regular file");
  }
  if (found.st_size < nbytes_) {
    return Status::error(
        "'" + name() + "' has " + std::to_string(found.st_size) + " bytes, expected " +
        std::to_string(nbytes_) + ": it was truncated or is another file");
  }
  // The kernel would read ahead of a plain head or tail, into memory that
  // nobody counted. Advice: nothing depends on it.
  (void)::posix_fadvise(plain_.get(), 0, 0, POSIX_FADV_RANDOM);
  if (options_.direct) {
    direct_fd_ = UniqueFd(open_retrying(path_, access | O_DIRECT));
    if (direct_fd_.get() < 0 && errno != EINVAL) {
      const int error = errno;
      if (options_.create) {
        (void)::unlink(path_.c_str());
      }
      return failed("opened with O_DIRECT", error);
    }
    struct stat again = {};
    if (direct_fd_.get() >= 0 &&
        (::fstat(direct_fd_.get(), &again) != 0 ||
         again.st_dev != found.st_dev || again.st_ino != found.st_ino)) {
      return Status::error("'" + name() + "' was replaced while it was opened");
    }
    direct_.store(direct_fd_.get() >= 0, std::memory_order_relaxed);
  }
  return {};
}

}  // namespace zero::aio
