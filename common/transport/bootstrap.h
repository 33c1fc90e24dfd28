// How the ranks of a job find and reach each other: everyone reports to the rendezvous store,
// learns the table of members, and connects to every other rank. All of it blocks, with a deadline,
// on the thread that calls bagua_init.
#ifndef BAGUA_COMMON_TRANSPORT_BOOTSTRAP_H_
#define BAGUA_COMMON_TRANSPORT_BOOTSTRAP_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/base/clock.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/base/wire.h"

namespace bagua {

// What a rank tells the others about itself.
struct Member {
  int rank = 0;
  int pid = 0;
  std::string host_id;    // equal on all ranks of a host
  std::string framework;  // "torch", ... for messages
  std::string address;    // "ip:port" of the rank's TCP listener, filled by Bootstrap
  std::string unix_name;  // abstract unix socket of the rank, filled by Bootstrap
};

struct BootstrapOptions {
  int rank = 0;
  int size = 1;
  std::string rendezvous;  // "host:port"
  Bytes secret;
  bool tcp_everywhere = false;  // as if every rank were on a host of its own
  Member self;                  // rank, pid, host_id, framework
  Deadline deadline = kForever;
  std::function<bool()> interrupted;  // asked about every 100 ms
};

// Connections to one peer; invalid for this rank itself.
struct PeerLink {
  // Same host (and not tcp_everywhere): a unix socket, descriptors can be passed.
  bool local = false;
  // Carries goodbye, abort and, when local, descriptors. Its end tells that the peer is gone.
  UniqueFd lifeline;
  UniqueFd control;  // !local: TCP stream of control messages, TCP_NODELAY
  UniqueFd data;     // !local: TCP stream of collectives' data
};

struct Membership {
  // By rank. The pid of a local peer is its number in this process's pid namespace, 0 if it has
  // none.
  std::vector<Member> members;
  std::vector<PeerLink> links;  // by rank
};

// Fails with kTimeout naming the ranks that did not come, kPeerLost naming a rank that was lost
// meanwhile (its store connection ended, or the launcher reported it), kAborted when interrupted,
// kInvalidArgument for a wrong secret, another protocol version, another size, or a rank given
// twice (both named). A rank's failure fails the round for all. A rank that is alone (size 1) asks
// no store. Returns on all ranks only after every rank is connected to every other. All sockets are
// non-blocking, close-on-exec, and passed an HMAC handshake.
Result<Membership> Bootstrap(BootstrapOptions options);

// boot id, host name and network namespace; what host_id is when nobody sets it.
std::string DefaultHostId();

}  // namespace bagua

#endif  // BAGUA_COMMON_TRANSPORT_BOOTSTRAP_H_
