// Watches every peer: one socket each, that carries goodbye, abort and shared descriptors, and
// whose end means that the peer is gone. Local peers are watched through their pidfd too, since a
// child that a peer forked may hold the socket open.
#ifndef BAGUA_COMMON_TRANSPORT_LIFELINE_H_
#define BAGUA_COMMON_TRANSPORT_LIFELINE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/base/wire.h"

namespace bagua {

// What happened to a peer. kLost: died or its connection broke. kLeft: said goodbye. kAborted: it
// ended the job's communication for the reason in `status`.
struct PeerEvent {
  enum class Kind { kLost, kLeft, kAborted };
  Kind kind;
  int peer;
  Status status;
};

// Thread-safety: all functions from any thread. `on_event` runs on the watching thread, which
// sleeps in epoll and never waits for another rank.
class Lifelines {
 public:
  struct Peer {
    UniqueFd socket;  // invalid for this rank itself
    int pid = 0;      // of a local peer in another process, else 0
  };

  Lifelines(std::vector<Peer> peers, std::function<void()> on_event);
  ~Lifelines();
  Status Start();

  // Hands `fd` to a local peer under `id`, which both sides know.
  Status SendSegment(int peer, uint64_t id, int fd);
  // Whether the peer's descriptor `id` has arrived; TakeSegment then gives it, once.
  bool HasSegment(int peer, uint64_t id) const;
  UniqueFd TakeSegment(int peer, uint64_t id);

  // Tell every peer. Failures to tell a peer that is gone are of no interest.
  void SendAbort(const Status& reason);
  void SendGoodbye();

  bool has_events() const { return has_events_.load(std::memory_order_acquire); }
  std::vector<PeerEvent> TakeEvents();

  // In a forked child: closes the descriptors, so that the parent's end is seen by its peers. Takes
  // no lock and starts nothing.
  void CloseInChild();

 private:
  struct Watched;
  void Watch();
  void OnSocket(int peer);
  void OnMessage(int peer);
  bool ReadSome(int peer);
  void OnGone(int peer, const std::string& how);
  void Push(PeerEvent event);
  Status SendMessage(int peer, uint32_t type, uint64_t id, const Bytes& payload, int fd);

  std::vector<std::unique_ptr<Watched>> peers_;
  const std::function<void()> on_event_;
  UniqueFd epoll_;
  UniqueFd stop_;
  std::thread thread_;
  mutable std::mutex mutex_;
  std::map<std::pair<int, uint64_t>, UniqueFd> segments_;  // guarded by mutex_
  std::vector<PeerEvent> events_;                          // guarded by mutex_
  std::atomic<bool> has_events_{false};
};

}  // namespace bagua

#endif  // BAGUA_COMMON_TRANSPORT_LIFELINE_H_
