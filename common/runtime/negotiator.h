// One rank's side of agreeing on a group's operations: sends what is submitted here to the group's
// coordinator rank, remembers what the ranks agreed on earlier, and hands out agreed units in the
// order that is the same on every rank. On the coordinator rank it holds the Coordinator.
//
// A submission costs one message to the coordinator and one back, however many operations travel in
// them; what is known travels as an id.
//
// Thread-safety: the thread that drives the engine's loop.
#ifndef BAGUA_COMMON_RUNTIME_NEGOTIATOR_H_
#define BAGUA_COMMON_RUNTIME_NEGOTIATOR_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/base/config.h"
#include "common/base/status.h"
#include "common/base/wire.h"
#include "common/collective/backend.h"
#include "common/runtime/coordinator.h"
#include "common/runtime/counters.h"
#include "common/runtime/operation.h"
#include "common/transport/mesh.h"

namespace bagua {

// Operations to carry out as one collective, each with the sizes that the ranks agreed on.
struct AgreedOperation {
  OperationPtr operation;
  std::shared_ptr<const Sizes> sizes;
  // Submitted by others while this rank has joined: it has no memory yet and is to give zeros.
  bool stands_in = false;
};
using AgreedUnit = std::vector<AgreedOperation>;

class Negotiator {
 public:
  Negotiator(uint32_t group, GroupRanks ranks, const Config& config, Mesh* mesh,
             Counters* counters);

  // Operations of one name at a time.
  void Submit(OperationPtr operation);
  // A control message of this group. Non-OK: the peer sent what no honest rank sends.
  Status OnMessage(int peer, Reader* reader);
  // Sends what was submitted and decided since the last call. True if there was any.
  bool Flush();

  // Whether this rank has joined, and which others have; until all have or the join fails.
  bool joined() const { return joined_; }
  const std::set<int>& joined_peers() const { return joined_peers_; }
  // Those that were heard of since the last call.
  bool has_new_joins() const { return !new_joins_.empty(); }
  std::vector<int> TakeJoins() { return std::exchange(new_joins_, {}); }
  // Of the unnamed operations that the ranks agreed on up to the last join's end: the last number.
  uint64_t unnamed_at_join() const { return unnamed_at_join_; }

  // Plans that other ranks register anew.
  const std::vector<Renewal>& renewals() const { return renewals_; }

  bool has_units() const { return !units_.empty(); }
  AgreedUnit TakeUnit();

  // `peer` left the job: what waits for it, or will, ends with `reason`.
  void Leave(int peer, const Status& reason);
  // Ends everything that waits here.
  void FailAll(const Status& reason);
  // Warns of and times out what ranks wait for; on the coordinator rank. Elsewhere times out when
  // the coordinator does not answer: non-OK, the job has failed.
  // `progressed`: when work was last seen to go on; ranks that joined wait for as long as it does.
  Status CheckStalls(Deadline now, Deadline progressed, const Config& config,
                     std::vector<std::string>* warnings);
  // Whether CheckStalls may have something to do.
  bool has_stalls() const {
    return !waiting_.empty() || (decides_ != nullptr && decides_->has_pending());
  }

  const GroupRanks& ranks() const { return ranks_; }

  // The group of a control message.
  static uint32_t GroupOf(Reader* reader) { return reader->Get<uint32_t>(); }

 private:
  // What an id stands for on this rank.
  struct Known {
    std::string name;
    Request request;
    std::shared_ptr<const Sizes> sizes;
    std::string signature;  // unnamed ones: the key in id_of_signature_
  };
  struct Waiting {
    OperationPtr operation;
    uint32_t id = 0;  // by which it was submitted
  };

  bool coordinates() const { return ranks_.rank == 0; }
  int coordinator() const { return ranks_.ranks[0]; }
  void Send(const OperationPtr& operation, bool in_full);
  uint32_t FindKnown(const Operation& operation) const;
  Status ReceiveSubmissions(int peer, Reader* reader);
  Status CheckCoordinator(Deadline submitted_before, Deadline progressed, Seconds patience) const;
  void EndJoin();
  AgreedOperation StandIn(Agreement agreement, std::shared_ptr<const Sizes> sizes) const;
  void Apply(Response response);
  void ApplyAgreement(Agreement agreement, AgreedUnit* unit);
  void Forget(uint32_t id);
  void Remember(const Agreement& agreement, const Operation& operation,
                std::shared_ptr<const Sizes> sizes);

  const uint32_t group_;
  const GroupRanks ranks_;
  const size_t capacity_;
  Mesh* const mesh_;
  Counters* const counters_;
  std::unique_ptr<Coordinator> decides_;  // on the coordinator rank
  Status left_;                           // why nothing can be agreed on any more
  std::set<int> gone_;                    // members that left; nothing is sent to them
  Deadline warned_ = Deadline::min();     // submissions before it were warned of

  std::unordered_map<OperationKey, Waiting, OperationKeyHash> waiting_;
  std::deque<AgreedUnit> units_;
  std::vector<Renewal> renewals_;
  std::unordered_map<uint32_t, Known> known_;
  std::unordered_map<std::string, uint32_t> id_of_name_;
  std::unordered_map<std::string, uint32_t> id_of_signature_;
  // Unnamed operations that failed before this rank submitted them, by number.
  std::unordered_map<uint64_t, Status> failed_early_;
  uint64_t heard_ = 0;  // responses applied
  bool joined_ = false;
  std::set<int> joined_peers_;
  std::vector<int> new_joins_;
  uint64_t last_unnamed_ = 0;  // of all agreements so far
  uint64_t unnamed_at_join_ = 0;
  Writer batch_;
  uint32_t batch_count_ = 0;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_RUNTIME_NEGOTIATOR_H_
