// Threads of the core.
#ifndef BAGUA_COMMON_BASE_THREAD_H_
#define BAGUA_COMMON_BASE_THREAD_H_

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace bagua {

// Runs `body` on a new thread that debuggers show as `name` (at most 15 characters). It takes no
// signals: they are for the process's own threads, whose waits they are meant to end.
template <class Body>
std::thread StartThread(const char* name, Body body) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::move(body));
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ::pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace bagua

#endif  // BAGUA_COMMON_BASE_THREAD_H_
