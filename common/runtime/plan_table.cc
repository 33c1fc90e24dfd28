#include "common/runtime/plan_table.h"

#include <algorithm>
#include <utility>

namespace bagua {
// ---- Life ---------------------------------------------------------------------------------------

Plan::Observer PlanTable::ObserverFor(const Negotiator* group) {
  const auto began = [this, group](const Plan& plan) {
    // Others know of a step that is served here.
    if (plan.serving()) return;
    for (const int peer : group->joined_peers())
      Tell(peer, {PlanNotice::Kind::kStepBegun, plan.number(), plan.steps_begun()});
  };
  return {progressed_, began};
}

void PlanTable::Adopt(std::shared_ptr<Plan> plan, const Negotiator* group) {
  lives_.push_back({group, plan->Run(), false});
  // Dropped while the ranks agreed on it: nobody else looks for it.
  if (plan->dropped()) NoteDrop();
  plans_.push_back(std::move(plan));
}

void PlanTable::Erase(size_t index) {
  if (plans_[index]->serving()) --services_;
  const uint32_t number = plans_[index]->number();
  begun_.erase(number);
  drops_.erase(number);
  // The exchange runs in the plan and ends before it.
  lives_.erase(lives_.begin() + static_cast<std::ptrdiff_t>(index));
  plans_.erase(plans_.begin() + static_cast<std::ptrdiff_t>(index));
}

void PlanTable::TellDropped(const Plan& plan, Life* life) {
  if (std::exchange(life->told, true)) return;
  for (const int rank : life->group->ranks().ranks)
    if (rank != mesh_->rank())
      Tell(rank, {PlanNotice::Kind::kDropped, plan.number(), plan.steps_finished()});
}

void PlanTable::LookForDropped() {
  for (size_t i = plans_.size(); i-- > 0;) {
    const Plan& plan = *plans_[i];
    if (!plan.dropped()) continue;
    const bool ended = lives_[i].run.done() || plan.failed();
    if (!ended) TellDropped(plan, &lives_[i]);
    const auto drops = drops_.find(plan.number());
    const int others = lives_[i].group->ranks().size() - 1;
    const bool by_all = others == 0 || (drops != drops_.end() && drops->second == others);
    if (ended || (by_all && !plan.exchanging()))
      Erase(i);
    else if (by_all)
      NoteDrop();  // in the midst of a step: to be looked at again
  }
}

void PlanTable::EndGroup(uint32_t group, const Status& reason) {
  for (size_t i = plans_.size(); i-- > 0;) {
    if (plans_[i]->group() != group) continue;
    const std::shared_ptr<Plan> plan = plans_[i];
    Erase(i);
    plan->Fail(reason);
  }
}

void PlanTable::Fail(const Status& reason) {
  for (const std::shared_ptr<Plan>& plan : plans_) plan->Fail(reason);
}

Status PlanTable::TakeFailure() {
  for (size_t i = 0; i < plans_.size(); ++i)
    if (lives_[i].run.done() && !plans_[i]->buckets().empty()) return lives_[i].run.Take();
  return {};
}

bool PlanTable::exchanging() const {
  return std::any_of(plans_.begin(), plans_.end(),
                     [](const std::shared_ptr<Plan>& plan) { return plan->exchanging(); });
}

// ---- Joined ranks -------------------------------------------------------------------------------

void PlanTable::Tell(int peer, const PlanNotice& notice) {
  Writer message;
  Encode(notice, &message);
  mesh_->PostControl(peer, message.Take());
}

Status PlanTable::OnMessage(Reader* reader) {
  Result<PlanNotice> decoded = DecodePlanNotice(reader);
  if (!decoded.ok()) return decoded.status();
  const PlanNotice& notice = decoded.value();
  if (notice.kind == PlanNotice::Kind::kDropped) {
    ++drops_[notice.number];
    NoteDrop();
  } else {
    uint64_t& begun = begun_[notice.number];
    begun = std::max(begun, notice.step);
  }
  return {};
}

void PlanTable::TellBegun(const Negotiator& group, int peer) {
  for (size_t i = 0; i < plans_.size(); ++i)
    if (lives_[i].group == &group && plans_[i]->steps_begun() > 0)
      Tell(peer, {PlanNotice::Kind::kStepBegun, plans_[i]->number(), plans_[i]->steps_begun()});
}

bool PlanTable::Serve() {
  bool moved = false;
  for (size_t i = 0; i < plans_.size(); ++i) {
    Plan& plan = *plans_[i];
    if (plan.serving()) {
      if (!plan.EndService()) continue;
      --services_;
      moved = true;
    }
    const auto begun = begun_.find(plan.number());
    if (begun == begun_.end() || begun->second <= plan.steps_finished()) continue;
    if (!lives_[i].group->joined() || plan.failed()) continue;
    plan.BeginService();
    ++services_;
    moved = true;
  }
  return moved;
}

bool PlanTable::serving(uint32_t group) const {
  return std::any_of(plans_.begin(), plans_.end(), [group](const std::shared_ptr<Plan>& plan) {
    return plan->group() == group && plan->serving();
  });
}

}  // namespace bagua
