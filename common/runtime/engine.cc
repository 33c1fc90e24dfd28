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
      loop_(this, wiring_.bell.get(), SpinTime(config_, topology_.local_size)) {
  context_ = {&config_,
              &wiring_,
              &mesh_,
              &scheduler_,
              &counters_,
              [this](std::shared_ptr<Plan> plan) {
                Task<Status> run = plan->Run();
                // Dropped while the ranks agreed on it: nobody else looks for it.
                if (plan->dropped()) plan_dropped_.store(true, std::memory_order_release);
                plans_.push_back({std::move(plan), std::move(run)});
              },
              [this] { wake_ = true; }};
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
  std::vector<int> everyone;
  for (int r = 0; r < engine->size(); ++r) everyone.push_back(r);
  const Result<uint32_t> group = engine->AddGroup(std::move(everyone), deadline);
  if (!group.ok()) return group.status();
  return engine;
}

Engine::~Engine() {
  Shutdown();
}

Result<uint32_t> Engine::AddGroup(std::vector<int> ranks, Deadline deadline) {
  const auto own = std::find(ranks.begin(), ranks.end(), rank());
  const bool valid = std::is_sorted(ranks.begin(), ranks.end()) && !ranks.empty() &&
                     ranks.front() >= 0 && ranks.back() < size() &&
                     std::adjacent_find(ranks.begin(), ranks.end()) == ranks.end();
  if (!valid || own == ranks.end())
    return Status(StatusCode::kInvalidArgument,
                  StrCat("a group needs ascending ranks of 0 to ", size() - 1,
                         " with its maker, rank ", rank(), ", among them"));
  const GroupRanks members{ranks, static_cast<int>(own - ranks.begin())};
  std::lock_guard one_at_a_time(making_group_);
  uint32_t id = 0;
  {
    std::lock_guard lock(mutex_);
    id = groups_made_++;
  }
  Group* group = loop_.AsDriver([&] {
    LiveGroup& live = groups_[id];
    live.group = std::make_unique<Group>(id, members, &context_);
    return live.group.get();
  });
  const Status connected = Connect(group, deadline);
  if (!connected.ok()) return connected;
  loop_.AsDriver([&] {
    LiveGroup& live = groups_[id];
    live.run = group->Run();
    live.connected = true;
    for (const Mesh::Control& control : early_[id])
      if (const Status status = OnControl(control); !status.ok() && failure_.ok()) Abort(status);
    early_.erase(id);
  });
  std::lock_guard lock(mutex_);
  group_entries_[id].ranks = std::move(ranks);
  return id;
}

Status Engine::Connect(Group* group, Deadline deadline) {
  Task<Status> connecting;
  std::atomic<bool> connected{false};
  loop_.AsDriver([&] {
    connecting = group->Connect();
    connecting_ = {&connecting, &connected};
  });
  const bool met =
      loop_.WaitUntil([&] { return connected.load(std::memory_order_acquire); }, deadline);
  return loop_.AsDriver([&]() -> Status {
    connecting_ = {};
    if (met) return connecting.Take();
    const std::vector<int> missing = scheduler_.AwaitedPeers();
    connecting = {};
    return Status(StatusCode::kTimeout,
                  StrCat("waited for the shared memory of ", JoinRanks(missing)));
  });
}

int Engine::GroupSize(uint32_t group) {
  std::lock_guard lock(mutex_);
  const auto found = group_entries_.find(group);
  return found == group_entries_.end() ? 0 : static_cast<int>(found->second.ranks.size());
}

// ---- Operations ---------------------------------------------------------------------------------

// With mutex_ held.
Status Engine::Admit(Operation* operation) {
  if (shut_down_.load(std::memory_order_relaxed))
    return Status(StatusCode::kNotInitialized, "the engine is shut down: call init again");
  const auto found = group_entries_.find(operation->request.group);
  if (found == group_entries_.end())
    return Status(StatusCode::kInvalidArgument,
                  StrCat(operation->Describe(), ": there is no group ", operation->request.group));
  GroupEntry& entry = found->second;
  BAGUA_RETURN_IF_ERROR(Validate(*operation, entry.ranks, rank()));
  if (operation->name.empty())
    operation->sequence = ++entry.unnamed;
  else if (!entry.names.insert(operation->name).second)
    return Status(StatusCode::kInvalidArgument,
                  StrCat(operation->Describe(),
                         " is in flight already. Wait for it, or give this one another name."));
  return {};
}

Status Engine::Enqueue(const OperationPtr& operation, bool caller_drives) {
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
  if (operation.name.empty()) return;
  std::lock_guard lock(mutex_);
  group_entries_[operation.request.group].names.erase(operation.name);
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
    const auto before = dropped_plans_.find(plan->name());
    if (before != dropped_plans_.end()) operation->request.position = before->second;
  }
  operation->plan = std::move(plan);
  return operation;
}

Status Engine::MakeReady(Plan* plan, size_t tensor) {
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
    dropped_plans_[plan->name()] = {plan->number(), static_cast<int64_t>(plan->steps_finished())};
  }
  plan_dropped_.store(true, std::memory_order_release);
  loop_.Notify();
}

void Engine::ForgetDroppedPlans() {
  bool left = false;
  std::erase_if(plans_, [&left](LivePlan& live) {
    if (!live.plan->dropped()) return false;
    if (live.plan->exchanging() && !live.run.done()) {
      left = true;
      return false;
    }
    live.run = {};  // before the plan that it runs in
    return true;
  });
  if (left) plan_dropped_.store(true, std::memory_order_release);
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
  if (plan_dropped_.exchange(false, std::memory_order_acq_rel)) ForgetDroppedPlans();
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
  const auto live = groups_.find(id);
  if (live == groups_.end() || !live->second.connected) {
    early_[id].push_back(control);
    return {};
  }
  return live->second.group->negotiator().OnMessage(control.peer, &reader);
}

void Engine::RunGroups(bool* moved) {
  if (failure_.ok())
    for (auto& [id, live] : groups_) *moved |= live.group->negotiator().Flush();
  *moved |= scheduler_.Poll();
  if (connecting_.task != nullptr && connecting_.task->done()) {
    connecting_.done->store(true, std::memory_order_release);
    wake_ = true;
  }
  if (!failure_.ok()) return;
  // A group or plan that came to an end has met a failure.
  for (auto& [id, live] : groups_)
    if (live.connected && live.run.done()) return Abort(live.run.Take());
  for (LivePlan& live : plans_)
    if (live.run.done() && !live.plan->buckets().empty()) return Abort(live.run.Take());
}

bool Engine::outstanding() const {
  if (closing_) return true;
  if (!failure_.ok()) return false;
  for (const auto& [id, live] : groups_)
    if (live.group->executing() || live.group->negotiator().has_stalls()) return true;
  for (const LivePlan& live : plans_)
    if (live.plan->exchanging()) return true;
  return !mesh_.Flushed();
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
