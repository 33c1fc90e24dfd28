// The plans that live on this rank, of all groups, and what joined ranks do for them.
//
// A rank that begins a step of a plan tells the ranks that have joined; these make the step with
// zeros. So a dropped plan lives on, unseen by its user, until all ranks of its group have dropped
// it: one that dropped it early may join.
#ifndef BAGUA_COMMON_RUNTIME_PLAN_TABLE_H_
#define BAGUA_COMMON_RUNTIME_PLAN_TABLE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "common/base/status.h"
#include "common/base/task.h"
#include "common/base/wire.h"
#include "common/runtime/negotiator.h"
#include "common/runtime/plan.h"
#include "common/transport/mesh.h"

namespace bagua {

// What ranks tell each other about a plan: that they begin a step, or dropped it.
struct PlanNotice {
  enum class Kind : uint8_t { kStepBegun = 1, kDropped = 2 };
  Kind kind = Kind::kStepBegun;
  uint32_t number = 0;
  uint64_t step = 0;
};

// A whole control message.
void Encode(const PlanNotice& notice, Writer* writer);
// Of what follows PlanTable::kMessages.
Result<PlanNotice> DecodePlanNotice(Reader* reader);

// Thread-safety: the thread that drives the engine's loop.
class PlanTable {
 public:
  // Stands in control messages where others have a group.
  static constexpr uint32_t kMessages = ~uint32_t{0};

  // `mesh` must outlive it. `progressed`: a bucket was exchanged.
  PlanTable(Mesh* mesh, std::function<void()> progressed)
      : mesh_(mesh), progressed_(std::move(progressed)) {}

  // What a plan tells of its exchange. `group`, which it belongs to, must outlive it.
  Plan::Observer ObserverFor(const Negotiator* group);
  // A plan that all ranks of `group` agreed on begins its life.
  void Adopt(std::shared_ptr<Plan> plan, const Negotiator* group);
  // A plan was dropped. Any thread.
  void NoteDrop() { drop_noted_.store(true, std::memory_order_release); }
  // Forgets what was dropped on every rank, or failed.
  void ForgetDropped() {
    if (drop_noted_.exchange(false, std::memory_order_acq_rel)) LookForDropped();
  }
  // The plans of a group fail and are forgotten.
  void EndGroup(uint32_t group, const Status& reason);
  // Sticky, for all.
  void Fail(const Status& reason);
  // The failure that a plan's exchange ended with; OK if none did.
  Status TakeFailure();

  Status OnMessage(Reader* reader);
  // `peer` has joined: it hears which steps were begun here.
  void TellBegun(const Negotiator& group, int peer);
  // Begins and ends steps for others, of groups in which this rank has joined. True if it did.
  bool Serve();
  // Whether steps are being served at all, and of one group.
  bool serving() const { return services_ > 0; }
  bool serving(uint32_t group) const;

  // Live ones, dropped ones among them.
  const std::vector<std::shared_ptr<Plan>>& plans() const { return plans_; }
  bool exchanging() const;

 private:
  struct Life {
    const Negotiator* group;
    Task<Status> run;
    bool told = false;  // that it was dropped here
  };
  void Tell(int peer, const PlanNotice& notice);
  void LookForDropped();
  void TellDropped(const Plan& plan, Life* life);
  void Erase(size_t index);

  Mesh* const mesh_;
  const std::function<void()> progressed_;
  std::vector<std::shared_ptr<Plan>> plans_;
  std::vector<Life> lives_;  // of plans_
  int services_ = 0;
  // By plan: the last step that another rank was heard to begin; how many others dropped it.
  std::map<uint32_t, uint64_t> begun_;
  std::map<uint32_t, int> drops_;
  std::atomic<bool> drop_noted_{false};
};

}  // namespace bagua

#endif  // BAGUA_COMMON_RUNTIME_PLAN_TABLE_H_
