#include "common/runtime/engine.h"

#include <unistd.h>

#include <algorithm>

#include "common/base/check.h"
#include "common/runtime/validate.h"

namespace bagua {
namespace {

constexpr Seconds kFlushPatience{1.0};

std::vector<int> HostsOf(const Wiring& wiring) {
  std::vector<int> hosts;
  for (const Wiring::Peer& peer : wiring.peers) hosts.push_back(peer.host);
  return hosts;
}

std::vector<Mesh::PeerPipes> TakePipes(Wiring* wiring) {
  std::vector<Mesh::PeerPipes> pipes;
  for (Wiring::Peer& peer : wiring->peers) pipes.push_back(std::move(peer.pipes));
  return pipes;
}

// Spinning threads would take the cores from the peers they wait for.
std::chrono::nanoseconds SpinTime(const Config& config, int local_size) {
  if (local_size > ::sysconf(_SC_NPROCESSORS_ONLN)) return std::chrono::nanoseconds(0);
  return std::chrono::nanoseconds(static_cast<int64_t>(config.spin_microseconds * 1000));
}

}  // namespace

Engine::Engine(Wiring wiring, Config config, Logger::Sink log_sink)
    : config_(std::move(config)),
      wiring_(std::move(wiring)),
      topology_(Topology::Of(HostsOf(wiring_), wiring_.rank)),
      logger_(wiring_.rank, ParseLogLevel(config_.log_level), std::move(log_sink)),
      mesh_(wiring_.rank, TakePipes(&wiring_), &scheduler_),
      plans_(&mesh_, [this] { wake_ = true; }),
      loop_(this, wiring_.bell.get(), SpinTime(config_, topology_.local_size)) {
  context_ = {&config_,
              &wiring_,
              &mesh_,
              &scheduler_,
              &counters_,
              &plans_,
              [this](OperationPtr operation) { return MakeGroup(std::move(operation)); },
              [this](const OperationPtr& operation) { EndGroup(operation); }};
}

Result<std::unique_ptr<Engine>> Engine::Start(Wiring wiring, Config config, Deadline deadline,
                                              Logger::Sink log_sink) {
  std::unique_ptr<Engine> engine(
      new Engine(std::move(wiring), std::move(config), std::move(log_sink)));
  for (int peer = 0; peer < engine->size(); ++peer) {
    if (peer == engine->rank()) continue;
    for (const int fd : engine->mesh_.Descriptors(peer)) {
      const Status watched = engine->loop_.Watch(fd);
      if (!watched.ok()) return watched;
    }
  }
  const Status started = engine->loop_.Start();
  if (!started.ok()) return started;
  const Status met = engine->MeetEveryone(deadline);
  if (!met.ok()) return met;
  return engine;
}

Engine::~Engine() {
  Shutdown();
}

// ---- Operations ---------------------------------------------------------------------------------

// With mutex_ held.
Status Engine::Admit(Operation* operation) {
  if (shut_down_.load(std::memory_order_relaxed))
    return Status(StatusCode::kNotInitialized, "the engine is shut down: call init again");
  const auto found = group_entries_.find(operation->request.group);
  if (found == group_entries_.end())
    return Status(StatusCode::kInvalidArgument,
                  StrCat(operation->Describe(), ": there is no process set ",
                         operation->request.group, "; it was removed, or never added"));
  GroupEntry& entry = found->second;
  BAGUA_RETURN_IF_ERROR(Validate(*operation, entry.ranks, rank()));
  if (entry.joining)
    return Status(StatusCode::kInvalidArgument,
                  StrCat(operation->Describe(),
                         ": this rank has joined. Wait until join ends, when all ranks have."));
  if (entry.removing)
    return Status(StatusCode::kInvalidArgument,
                  StrCat(operation->Describe(), ": process set ", operation->request.group, " (",
                         JoinRanks(entry.ranks), ") is being removed"));
  if (operation->name.empty()) operation->sequence = ++entry.unnamed;
  if ((!operation->name.empty() || operation->request.group != 0) &&
      !entry.in_flight.try_emplace({operation->name, operation->sequence}, operation->request.kind)
           .second)
    return Status(StatusCode::kInvalidArgument,
                  StrCat(operation->Describe(),
                         " is in flight already. Wait for it, or give this one another name."));
  if (operation->request.kind == Kind::kRemoveGroup) {
    const Status status = AdmitRemoval(operation);
    if (!status.ok()) entry.in_flight.erase({operation->name, operation->sequence});
    return status;
  }
  if (operation->request.kind == Kind::kJoin) {
    entry.joining = true;
    joins_.fetch_add(1, std::memory_order_relaxed);
  }
  return {};
}

Status Engine::Enqueue(const OperationPtr& operation, bool caller_drives) {
  if (operation->request.kind == Kind::kJoin)
    BAGUA_RETURN_IF_ERROR(CheckNoStepBegun(operation->request.group));
  operation->observer = this;
  operation->since = Clock::now();
  {
    std::lock_guard lock(mutex_);
    BAGUA_RETURN_IF_ERROR(Admit(operation.get()));
    inbox_.push_back(operation);
    inbox_filled_.store(true, std::memory_order_seq_cst);
  }
  if (!caller_drives) loop_.Notify();
  return {};
}

void Engine::OnEnd(const Operation& operation, const Status& status) {
  if (status.ok()) Counters::Add(counters_.operations);
  if (status.code() == StatusCode::kPeerLost) LogEnd(status);
  wake_ = true;
  if (operation.name.empty() && operation.request.group == 0) return;
  std::lock_guard lock(mutex_);
  const auto entry = group_entries_.find(operation.request.group);
  if (entry == group_entries_.end()) return;
  entry->second.in_flight.erase({operation.name, operation.sequence});
  if (operation.request.kind == Kind::kJoin) {
    entry->second.joining = false;
    joins_.fetch_sub(1, std::memory_order_relaxed);
    // What the others did meanwhile counts here too.
    if (const auto live = groups_.find(operation.request.group); live != groups_.end())
      entry->second.unnamed =
          std::max(entry->second.unnamed, live->second.group->negotiator().unnamed_at_join());
  }
  if (operation.request.kind != Kind::kRemoveGroup || status.ok()) return;
  if (const auto kept = group_entries_.find(operation.removes); kept != group_entries_.end())
    kept->second.removing = false;
}

bool Engine::Wait(const Operation& operation, Deadline deadline) {
  const bool ended = loop_.WaitUntil([&operation] { return operation.ended(); }, deadline);
  // Queued without a word and not looked at, it is the background thread's from here on.
  if (!ended) loop_.Notify();
  return ended;
}

// ---- Plans --------------------------------------------------------------------------------------

OperationPtr Engine::RegisterPlan(std::shared_ptr<Plan> plan, uint32_t group) {
  auto operation = std::make_shared<Operation>();
  operation->request.kind = Kind::kRegisterPlan;
  operation->request.group = group;
  operation->request.details = plan->Details();
  operation->name = plan->name();
  {
    std::lock_guard lock(mutex_);
    const auto before = dropped_plans_.find({group, plan->name()});
    if (before != dropped_plans_.end()) operation->request.position = before->second;
  }
  operation->plan = std::move(plan);
  return operation;
}

Status Engine::CheckNotJoined(const Plan& plan) {
  if (joins_.load(std::memory_order_relaxed) == 0 && !plan.serving()) return {};
  std::lock_guard lock(mutex_);
  const auto entry = group_entries_.find(plan.group());
  const bool joined = entry != group_entries_.end() && entry->second.joining;
  if (!joined && !plan.serving()) return {};
  return Status(StatusCode::kInvalidArgument,
                StrCat("plan '", plan.name(),
                       "': this rank has joined. Wait until join ends, when all ranks have."));
}

Status Engine::CheckNoStepBegun(uint32_t group) {
  return loop_.AsDriver([&]() -> Status {
    for (const std::shared_ptr<Plan>& plan : plans_.plans())
      if (plan->group() == group && !plan->dropped() && plan->step_begun())
        return Status(
            StatusCode::kInvalidArgument,
            StrCat("join: plan '", plan->name(), "' is in the midst of step ",
                   plan->steps_finished() + 1, " on this rank. Finish the step before joining."));
    return {};
  });
}

Status Engine::MakeReady(Plan* plan, size_t tensor) {
  BAGUA_RETURN_IF_ERROR(CheckNotJoined(*plan));
  bool published = false;
  BAGUA_RETURN_IF_ERROR(plan->MakeReady(tensor, &published));
  if (!published) return {};
  // Whoever made the last bucket ready comes to finish the step.
  if (plan->all_published())
    loop_.NotifyLazily();
  else
    loop_.Notify();
  return {};
}

Status Engine::FinishStep(Plan* plan, Deadline deadline) {
  BAGUA_RETURN_IF_ERROR(CheckNotJoined(*plan));
  const Result<bool> begun = plan->BeginFinish();
  if (!begun.ok()) return begun.status();
  if (!loop_.WaitUntil([plan] { return plan->StepDone(); }, deadline))
    return Status(StatusCode::kInProgress, "");
  return plan->EndFinish();
}

void Engine::DropPlan(Plan* plan) {
  plan->Drop();
  if (plan->registered()) {
    std::lock_guard lock(mutex_);
    dropped_plans_[{plan->group(), plan->name()}] = {plan->number(),
                                                     static_cast<int64_t>(plan->steps_finished())};
  }
  plans_.NoteDrop();
  loop_.Notify();
}

// ---- The loop's work ----------------------------------------------------------------------------

bool Engine::Pass() {
  bool moved = false;
  if (inbox_filled_.load(std::memory_order_seq_cst)) TakeInbox(&moved);
  if (failure_.ok() || closing_) MoveMessages(&moved);
  RunGroups(&moved);
  if (wiring_.lifelines->has_events()) {
    TakePeerEvents();
    moved = true;
  }
  // Both leave answers behind, which the next pass sends.
  if (!moved && failure_.ok()) CheckRenewals();
  if (!moved && (!leavers_.empty() || !left_.empty())) moved = CheckLeavers();
  if (next_check_ != kForever || outstanding()) moved = CheckStalls() || moved;
  plans_.ForgetDropped();
  if (std::exchange(wake_, false)) loop_.WakeWaiters();
  return moved;
}

void Engine::TakeInbox(bool* moved) {
  std::vector<OperationPtr> arrived;
  {
    std::lock_guard lock(mutex_);
    inbox_filled_.store(false, std::memory_order_relaxed);
    arrived.swap(inbox_);
  }
  *moved = *moved || !arrived.empty();
  for (OperationPtr& operation : arrived) {
    if (failure_.ok())
      groups_.at(operation->request.group).group->negotiator().Submit(std::move(operation));
    else
      operation->End(failure_.WithContext(operation->Describe()));
  }
}

void Engine::MoveMessages(bool* moved) {
  Status status = mesh_.Progress(moved);
  while (status.ok()) {
    const std::optional<Mesh::Control> control = mesh_.TakeControl();
    if (!control) break;
    *moved = true;
    status = OnControl(*control);
    if (!status.ok())
      status = status.WithContext(StrCat("message from ", wiring_.peers[control->peer].name));
  }
  flushed_.store(mesh_.Flushed() || !status.ok(), std::memory_order_release);
  if (!status.ok() && failure_.ok()) Abort(status);
}

Status Engine::OnControl(const Mesh::Control& control) {
  if (!failure_.ok()) return {};
  Reader reader(control.message);
  const uint32_t id = Negotiator::GroupOf(&reader);
  if (id == PlanTable::kMessages) return plans_.OnMessage(&reader);
  const auto live = groups_.find(id);
  // The last words about a group that is gone may come behind those that ended it.
  if (live == groups_.end() && id != 0 && id <= last_group_) return {};
  if (live == groups_.end() || !live->second.connected) {
    early_[id].push_back(control);
    return {};
  }
  return live->second.group->negotiator().OnMessage(control.peer, &reader);
}

void Engine::RunGroups(bool* moved) {
  bool joined = plans_.serving();
  for (auto& [id, live] : groups_) {
    if (!failure_.ok()) break;
    Negotiator& negotiator = live.group->negotiator();
    *moved |= negotiator.Flush();
    joined |= negotiator.joined();
    if (!negotiator.has_new_joins()) continue;
    for (const int peer : negotiator.TakeJoins()) plans_.TellBegun(negotiator, peer);
    *moved = true;
  }
  if (joined) *moved |= plans_.Serve();
  *moved |= scheduler_.Poll();
  for (const uint32_t id : std::exchange(ended_groups_, {})) groups_.erase(id);
  if (connecting_.task != nullptr && connecting_.task->done()) {
    connecting_.done->store(true, std::memory_order_release);
    wake_ = true;
  }
  if (!failure_.ok()) return;
  // A group or plan that came to an end has met a failure.
  for (auto& [id, live] : groups_)
    if (live.connected && live.run.done()) return Abort(live.run.Take());
  if (const Status failure = plans_.TakeFailure(); !failure.ok()) Abort(failure);
}

bool Engine::outstanding() const {
  if (closing_) return true;
  if (!failure_.ok()) return false;
  for (const auto& [id, live] : groups_)
    if (live.group->executing() || live.group->negotiator().has_stalls()) return true;
  return plans_.exchanging() || !mesh_.Flushed();
}

// ---- End ----------------------------------------------------------------------------------------

void Engine::Shutdown() {
  {
    std::lock_guard lock(mutex_);
    if (shut_down_.exchange(true)) return;
  }
  const bool healthy = loop_.AsDriver([this] {
    const bool was_healthy = failure_.ok();
    flushed_.store(false, std::memory_order_relaxed);
    if (was_healthy) FailEverything(Status(StatusCode::kAborted, "this rank called shutdown"));
    closing_ = true;
    return was_healthy;
  });
  if (healthy)
    loop_.WaitUntil([this] { return flushed_.load(std::memory_order_acquire); },
                    After(kFlushPatience));
  loop_.Stop();
  // Threads that wait drive too, until they see the end of what they wait for.
  loop_.AsDriver([this] { mesh_.CloseWrite(); });
  wiring_.lifelines->SendGoodbye();
  loop_.AsDriver([this] { Pass(); });  // ends what was queued meanwhile
}

void Engine::CloseInChild() {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    for (const int fd : mesh_.Descriptors(peer)) ::close(fd);
  }
  wiring_.lifelines->CloseInChild();
  loop_.CloseInChild();
}

}  // namespace bagua
