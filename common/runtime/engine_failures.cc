// Engine: what peers and time do to a job.
#include <algorithm>
#include <utility>

#include "common/runtime/engine.h"

namespace bagua {

// ---- Failure ------------------------------------------------------------------------------------

void Engine::TakePeerEvents() {
  for (const PeerEvent& event : wiring_.lifelines->TakeEvents()) {
    const std::string& name = wiring_.peers[event.peer].name;
    switch (event.kind) {
      case PeerEvent::Kind::kLost:
        Abort(Status(StatusCode::kPeerLost, StrCat(name, " was lost: ", event.status.message())));
        break;
      case PeerEvent::Kind::kAborted:
        // A loss names its rank by itself.
        if (event.status.code() == StatusCode::kPeerLost)
          Abort(Status(StatusCode::kPeerLost,
                       StrCat(event.status.message(), " (reported by rank ", event.peer, ")")));
        else
          Abort(event.status.WithContext(StrCat(name, " ended the job's communication")));
        break;
      case PeerEvent::Kind::kLeft:
        leavers_.insert(event.peer);
        break;
    }
  }
}

// A plan that one rank alone registers anew would let the others wait for ever.
void Engine::CheckRenewals() {
  for (const std::shared_ptr<Plan>& live : plans_.plans()) {
    const Plan& plan = *live;
    const auto group = groups_.find(plan.group());
    if (plan.dropped() || !plan.exchanging() || group == groups_.end()) continue;
    for (const Renewal& renewal : group->second.group->negotiator().renewals()) {
      if (renewal.name != plan.name() || renewal.number != plan.number() ||
          renewal.rank == rank() || plan.steps_finished() < renewal.steps)
        continue;
      return Abort(Status(
          StatusCode::kMismatch,
          StrCat("rank ", renewal.rank, " registers plan '", plan.name(), "' anew after step ",
                 renewal.steps, ", rank ", rank(), " is in step ", plan.steps_finished() + 1,
                 " of the old one. All ranks must change the parameters before the same step.")));
    }
  }
}

// bagua-run knows by this line, too, which ranks were not the first to fail.
void Engine::LogEnd(const Status& reason) {
  if (std::exchange(end_logged_, true)) return;
  logger_.Log(LogLevel::kWarning, StrCat("the job's communication ended: ", reason.message()));
}

Status Engine::LeftReason(int peer) const {
  return Status(
      StatusCode::kPeerLost,
      StrCat(wiring_.peers[peer].name, " left the job: its script ended or called shutdown"));
}

bool Engine::CheckLeavers() {
  bool gone = false;
  for (auto leaver = leavers_.begin(); leaver != leavers_.end();) {
    const int peer = *leaver;
    if (!mesh_.Ended(peer)) {
      ++leaver;
      continue;
    }
    leaver = leavers_.erase(leaver);
    left_.insert(peer);
    for (auto& [id, live] : groups_) live.group->negotiator().Leave(peer, LeftReason(peer));
    wake_ = true;
    gone = true;
  }
  for (const int peer : left_)
    if (failure_.ok() && scheduler_.IsAwaited(peer)) Abort(LeftReason(peer));
  return gone;
}

void Engine::Abort(const Status& reason) {
  if (!failure_.ok() || closing_) return;
  LogEnd(reason);
  FailEverything(reason);
  // Peers that are stopped may take a while to be told; this rank's own waiters come first.
  loop_.WakeWaiters();
  wiring_.lifelines->SendAbort(reason);
}

void Engine::FailEverything(const Status& reason) {
  failure_ = reason;
  scheduler_.Fail(reason);
  for (auto& [id, live] : groups_) live.group->negotiator().FailAll(reason);
  plans_.Fail(reason);
  wake_ = true;
}

// ---- Waiting for too long -----------------------------------------------------------------------

bool Engine::CheckStalls() {
  double shortest = 0;
  for (const double limit : {config_.stall_warning_seconds, config_.timeout_seconds})
    if (limit > 0 && (shortest == 0 || limit < shortest)) shortest = limit;
  if (shortest == 0 || !failure_.ok()) {
    next_check_ = kForever;
    return false;
  }
  const Deadline now = Clock::now();
  if (next_check_ != kForever && now < next_check_) return false;
  const bool due = next_check_ != kForever;
  next_check_ = outstanding() ? now + std::chrono::duration_cast<Clock::duration>(
                                          Seconds(std::clamp(shortest / 10, 0.01, 1.0)))
                              : kForever;
  if (!due) return false;
  const int64_t work = counters_.units + counters_.plan_buckets;
  if (std::exchange(seen_work_, work) != work) progressed_ = now;
  std::vector<std::string> warnings;
  Status status;
  for (auto& [id, live] : groups_) {
    status = live.group->negotiator().CheckStalls(now, progressed_, config_, &warnings);
    if (!status.ok()) break;
  }
  for (const std::string& warning : warnings) logger_.Log(LogLevel::kWarning, warning);
  if (status.ok()) status = CheckStalledWork(now);
  if (!status.ok()) Abort(status);
  return true;
}

// What is agreed on and does not proceed: a peer is stopped, or still computes.
Status Engine::CheckStalledWork(Deadline now) {
  std::vector<std::pair<std::string, double>> slow;
  for (const auto& [id, live] : groups_)
    if (live.group->executing())
      slow.emplace_back(live.group->DescribeExecuting(),
                        Seconds(now - live.group->executing_since()).count());
  for (const std::shared_ptr<Plan>& plan : plans_.plans())
    if (plan->exchanging())
      slow.emplace_back(plan->DescribeExchange(), Seconds(now - plan->waiting_since()).count());
  for (const auto& [what, seconds] : slow) {
    const std::string whom = JoinRanks(scheduler_.AwaitedPeers());
    if (config_.timeout_seconds > 0 && seconds >= config_.timeout_seconds)
      return Status(StatusCode::kTimeout,
                    StrCat(what, " waited ", config_.timeout_seconds, " s for ", whom,
                           ". Set BAGUA_TIMEOUT_SECONDS to wait longer."));
    if (config_.stall_warning_seconds > 0 && seconds >= config_.stall_warning_seconds &&
        warned_.insert(what).second)
      logger_.Log(LogLevel::kWarning,
                  StrCat(what, " waits since ", static_cast<int64_t>(seconds), " s for ", whom));
  }
  if (slow.empty()) warned_.clear();
  return {};
}

}  // namespace bagua
