// A thread that takes no signals: they go to the threads of the program, where
// Ctrl-C has a meaning.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "zero/status.h"

namespace zero::aio {

template <typename Body>
Result<std::thread> quiet_thread(Body body) {
  sigset_t all;
  sigset_t before;
  (void)::sigfillset(&all);
  (void)::pthread_sigmask(SIG_SETMASK, &all, &before);  // the new thread inherits it
  Result<std::thread> made = [&]() -> Result<std::thread> {
    try {
      return std::thread(std::move(body));
    } catch (const std::system_error& error) {
      return Status::error(
          std::string("a thread for file I/O could not be made: ") + error.what(),
          error.code().value());
    }
  }();
  (void)::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return made;
}

}  // namespace zero::aio
