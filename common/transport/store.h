// The rendezvous store: collects one report from each rank, hands the table to all, and tells all
// when one of them is lost before every rank is connected. Serves one round after the other, so a
// job may shut down and init again.
//
// A round fails for all ranks when the time of the first one is up, when one is lost or gives up,
// or when reports contradict each other. The failure is told to every rank once, also to those that
// come later; it is over when a rank comes that was told already.
#ifndef BAGUA_COMMON_TRANSPORT_STORE_H_
#define BAGUA_COMMON_TRANSPORT_STORE_H_

#include <memory>
#include <string>

#include "common/base/status.h"
#include "common/base/wire.h"

namespace bagua {

// Runs on a thread of its own, asleep in epoll while nobody calls.
// Thread-safety: any thread.
class StoreServer {
 public:
  // `host` is a name or an address to listen at, "0.0.0.0" for all; `port` 0 takes a free one. The
  // secret is copied; it has at least 16 bytes when `size` > 1. kInvalidArgument or kInternal with
  // the reason if it cannot listen.
  static Result<std::unique_ptr<StoreServer>> Start(const std::string& host, int port, int size,
                                                    Bytes secret);
  // Ranks that still wait get kPeerLost.
  virtual ~StoreServer() = default;
  virtual int port() const = 0;
  // Fails the ranks waiting in the current round and any later one with kPeerLost naming `rank`,
  // if that rank has not completed the round that is under way. `why`: "exited with code 3".
  virtual void ReportLost(int rank, const std::string& why) = 0;
  // In a forked child: closes the listening socket, so that nobody calls when the parent has ended.
  // Takes no lock and starts nothing; the child then leaves the store alone and never destroys it.
  virtual void CloseInChild() = 0;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_TRANSPORT_STORE_H_
