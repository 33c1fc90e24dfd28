// Connects a rank to every other one, once the table of a round is known: each pair by the sockets
// of a PeerLink, each socket with a handshake of its own.
#ifndef BAGUA_COMMON_TRANSPORT_LINKS_H_
#define BAGUA_COMMON_TRANSPORT_LINKS_H_

#include <poll.h>

#include <cstddef>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "common/base/clock.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/base/wire.h"
#include "common/transport/bootstrap.h"
#include "common/transport/handshake.h"
#include "common/transport/socket.h"
#include "common/transport/store_channel.h"

namespace bagua {

// Where a rank waits for others; one listener may be missing.
struct Listeners {
  UniqueFd tcp;
  UniqueFd local;  // unix
};

// Whether `a` connects to `b`, or waits for it: the same answer on both sides. The greater rank
// connects; but a rank that only its own host can reach connects to one that all can.
bool Connects(const Member& a, const Member& b, bool local);

// Does not block. Thread-safety: one thread at a time.
class LinkBuilder {
 public:
  LinkBuilder(int rank, RoundTable table, bool tcp_everywhere, Bytes secret, Listeners listeners);
  // kInvalidArgument if an address of the table cannot be read.
  Status Start();
  // Appends what poll() is to wait for; Progress takes the same entries after it. A connection that
  // fails is tried again: when its peer is dead, the store tells. kInvalidArgument: what listens at
  // a peer's address is not that peer. kInternal: this process may open no more descriptors.
  void AddInterest(std::vector<pollfd>* interest);
  Status Progress(const std::vector<pollfd>& polled);
  // When Progress has something to do without an event.
  Deadline next_time() const;

  // Every link stands, on this rank's side.
  bool complete() const { return missing_ == 0; }
  // "rank 3 at 10.0.0.3:4711 (Connection refused), rank 5 (has not connected)".
  std::string DescribeMissing() const;
  // Once complete. The pid of a local peer is the one that it has in this process's pid namespace,
  // 0 if it is not in there.
  Membership Take();

 private:
  struct Attempt {
    int peer;
    Purpose purpose;
    SocketAddress address;
    std::optional<Handshake> handshake;  // from when the connection stands
    UniqueFd fd;                         // invalid: waits until `time` to try again
    Deadline time;                       // of the next try, or when this one has taken too long
    std::chrono::milliseconds pause{20};
    std::string last_failure = "no answer";
    bool done = false;
    size_t slot = 0;  // in the entries for poll()
  };
  struct Guest {
    UniqueFd fd;
    Handshake handshake;
    Deadline until;
    bool local;
    size_t slot;
  };

  bool IsLocal(int peer) const;
  Status Advance(Attempt* attempt);
  Status Begin(Attempt* attempt);
  void TryLater(Attempt* attempt, const Status& failure);
  Status AcceptFrom(int listener, bool local);
  // Whether the guest is still awaited.
  bool Advance(Guest* guest);
  bool Awaits(const Guest& guest) const;
  void Keep(int peer, Purpose purpose, UniqueFd fd);
  UniqueFd& Place(int peer, Purpose purpose);

  const int rank_;
  const bool tcp_everywhere_;
  const Bytes secret_;
  const RoundId round_;
  Listeners listeners_;
  Membership membership_;
  std::list<Attempt> attempts_;
  std::list<Guest> guests_;
  size_t missing_ = 0;  // sockets that do not stand
  size_t first_slot_ = 0;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_TRANSPORT_LINKS_H_
