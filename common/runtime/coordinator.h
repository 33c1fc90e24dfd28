// The rank that decides: collects what the ranks of a group submit, checks that it fits together,
// and answers with an order that is the same for all. Pure: messages in, messages out; no I/O, no
// clock.
#ifndef BAGUA_COMMON_RUNTIME_COORDINATOR_H_
#define BAGUA_COMMON_RUNTIME_COORDINATOR_H_

#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/base/clock.h"
#include "common/base/config.h"
#include "common/base/status.h"
#include "common/base/wire.h"
#include "common/runtime/request.h"

namespace bagua {

// One rank's wish to run an operation. A known one is named by its id alone.
struct Submission {
  uint32_t id = 0;        // 0: `name` and `request` are given
  uint64_t sequence = 0;  // unnamed operations: which one, from 1; 0 for named ones
  std::string name;
  Request request;
};

void Encode(const Submission& submission, Writer* writer);
Result<Submission> DecodeSubmission(Reader* reader);

// One operation that all ranks have agreed on, or that fails on all of them.
struct Agreement {
  uint32_t id = 0;     // by which it is known from here on; 0: not remembered
  bool known = false;  // every rank has `id` and its sizes already; name and sizes do not travel
  uint64_t sequence = 0;
  std::string name;
  Sizes sizes;  // kJoin: the last rank to join
  Status error;
  // Set where ranks that joined take part without having submitted it: what they do not know of it.
  std::optional<Request> served = std::nullopt;
};

// A step of the total order: agreements of one unit are carried out as one collective. Ids in
// `forgotten`, which the units may name, are out of use after them.
struct Unit {
  std::vector<Agreement> agreements;
};
// `rank` has dropped plan `number` after `steps` steps and registers another of that name; who
// waits for it in a later step of the old one waits in vain.
struct Renewal {
  int rank = 0;
  std::string name;
  uint32_t number = 0;
  uint64_t steps = 0;
};
struct Response {
  std::vector<uint32_t> forgotten;
  std::vector<Unit> units;
  std::vector<Renewal> renewals;
  std::vector<int32_t> joined;  // global ranks that joined since the response before
  bool empty() const {
    return forgotten.empty() && units.empty() && renewals.empty() && joined.empty();
  }
};

Bytes Encode(const Response& response);
Result<Response> DecodeResponse(Reader* reader);

// An operation that some ranks have submitted and others have not.
struct Stall {
  std::string what;
  std::vector<int> missing;  // global ranks
  Deadline since;
};

// A rank that joined gives zeros to the allreduces (sums and averages) of the others, whatever else
// they submit fails, until all have joined, when the join is agreed on behind everything else.
//
// Thread-safety: the thread that drives the engine's loop.
class Coordinator {
 public:
  // `ranks`: the group's global ranks.
  Coordinator(std::vector<int> ranks, const Config& config);

  // `rank` is the place in the group; `heard`: how many responses it had applied when it submitted.
  // kInternal for a submission that no honest rank sends.
  Status Receive(int rank, Submission submission, Deadline now, uint64_t heard);
  // What became complete since the last call.
  Response TakeResponse();

  // `rank` left the job: everything that waits for it, or will, fails with `reason`.
  void Leave(int rank, const Status& reason);
  std::vector<Stall> Stalls(Deadline submitted_before) const;
  // Fails what has waited since before `submitted_before`; the text says `seconds`.
  void TimeOut(Deadline submitted_before, double seconds);
  bool has_pending() const { return !pending_.empty(); }
  // Work went on until `at`: those who joined do not wait in vain.
  void NoteProgress(Deadline at);

 private:
  struct Pending;
  struct Known {
    std::string name;
    std::vector<Request> requests;  // by rank
    Sizes sizes;
    std::list<uint32_t>::iterator use;
    int pending = 0;
  };
  using Key = OperationKey;
  struct Pending {
    std::vector<Submission> submissions;  // by rank
    std::vector<bool> submitted;
    int count = 0;
    int last = 0;  // the rank that submitted last
    Deadline since;
  };

  void Join(int rank, uint64_t heard);
  void EndJoin();
  bool IsComplete(const Pending& pending) const;
  void Complete(const Key& key, Pending pending);
  Agreement Agree(const Key& key, Pending& pending, Request* first);
  // The operation that every rank that submitted `pending` knows by the same id; 0 if none.
  uint32_t CommonId(const Pending& pending) const;
  const Request& RequestOf(const Pending& pending, size_t rank) const;
  Status CheckServable(const Key& key, const Pending& pending);
  void Fail(const Key& key, const Pending& pending, const Status& error);
  void ReleaseIds(const Pending& pending);
  uint32_t Remember(const Key& key, std::vector<Request> requests, const Sizes& sizes);
  void Forget(uint32_t id);
  void AddToUnits(Agreement agreement, const Request& request);
  std::string DescribePending(const Key& key, const Pending& pending) const;
  std::vector<int> Missing(const Pending& pending) const;

  const std::vector<int> ranks_;
  const size_t capacity_;
  const size_t fusion_bytes_;
  std::unordered_map<Key, Pending, OperationKeyHash> pending_;
  std::unordered_map<uint32_t, Known> known_;
  std::unordered_map<std::string, uint32_t> id_of_name_;
  std::list<uint32_t> uses_;  // least recently used first
  uint32_t next_id_ = 1;
  Status left_;  // why nothing can complete any more
  Response response_;
  uint64_t told_ = 0;  // responses that were taken
  // By rank: what ended without it, with the number of the response that says so. What it submits
  // before it hears of that, it ends when it does.
  std::vector<std::unordered_map<Key, uint64_t, OperationKeyHash>> ended_without_;
  // By rank: the response by which it knows all ids that its dropped submissions named.
  std::vector<uint64_t> dropped_;
  std::vector<bool> joined_;  // by rank
  int joined_count_ = 0;
  // By rank: it joined before it knew that submissions of its were dropped; it will repeat them.
  std::vector<bool> repeats_;
  // Units of response_ that may take in more: what must be equal, the unit, its bytes.
  struct Open {
    std::string key;
    size_t unit;
    size_t bytes;
  };
  std::vector<Open> open_;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_RUNTIME_COORDINATOR_H_
