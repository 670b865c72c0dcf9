// What an errno means here, and what to do about it.
#pragma once

#include <cerrno>
#include <cstring>
#include <string>

namespace zero::aio {

inline std::string reason_for(int error) {
  std::string reason = std::strerror(error);
  switch (error) {
    case EEXIST:
      return reason + "; a file is never overwritten: remove it or choose another name";
    case ENOSPC:
    case EDQUOT:
      return reason + "; free space there or choose another directory";
    case EIO:
      return reason + "; the device failed, and the kernel's log may say why";
    default:
      return reason;
  }
}

}  // namespace zero::aio
