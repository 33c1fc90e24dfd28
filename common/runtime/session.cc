#include "common/runtime/session.h"

#include <algorithm>

namespace bagua {
namespace {

Status UnknownHandle(uint64_t handle) {
  return Status(StatusCode::kInvalidArgument,
                StrCat("there is no operation with handle ", handle,
                       ": it was released, or belongs to an engine that was shut down"));
}

Status UnknownPlan(uint64_t ticket) {
  return Status(StatusCode::kInvalidArgument,
                StrCat("there is no plan ", ticket,
                       ": it was dropped, or belongs to an engine that was shut down"));
}

Status InProgress() {
  return Status(StatusCode::kInProgress, "the operation has not ended yet");
}

bool KeepsResults(const Operation& operation) {
  return operation.allocate == nullptr && (operation.request.kind == Kind::kAllgather ||
                                           operation.request.kind == Kind::kReduceScatter ||
                                           operation.request.kind == Kind::kAlltoall);
}

}  // namespace

Session::Session(std::unique_ptr<Engine> engine, uint64_t first_ticket)
    : engine_(std::move(engine)), operations_(first_ticket), plans_(first_ticket) {}

Result<uint64_t> Session::Enqueue(OperationPtr operation) {
  const Status queued = engine_->Enqueue(operation);
  if (!queued.ok()) return queued;
  return operations_.Add(std::move(operation));
}

Status Session::Wait(uint64_t handle, Deadline deadline) {
  const OperationPtr operation = operations_.Find(handle);
  if (operation == nullptr) return UnknownHandle(handle);
  if (!engine_->Wait(*operation, deadline)) return InProgress();
  return operation->status();
}

Status Session::Poll(uint64_t handle) {
  const OperationPtr operation = operations_.Find(handle);
  if (operation == nullptr) return UnknownHandle(handle);
  return operation->ended() ? operation->status() : InProgress();
}

Status Session::Run(OperationPtr operation, Deadline deadline, uint64_t* handle) {
  *handle = 0;
  BAGUA_RETURN_IF_ERROR(engine_->Enqueue(operation, /*caller_drives=*/true));
  if (!engine_->Wait(*operation, deadline)) {
    *handle = operations_.Add(std::move(operation));
    return InProgress();
  }
  Status status = operation->status();
  if (status.ok() && KeepsResults(*operation)) *handle = operations_.Add(std::move(operation));
  return status;
}

Result<OperationPtr> Session::Ended(uint64_t handle) {
  const OperationPtr operation = operations_.Find(handle);
  if (operation == nullptr) return UnknownHandle(handle);
  if (!operation->ended() || !operation->status().ok())
    return Status(StatusCode::kInvalidArgument,
                  StrCat(operation->Describe(), " has no result: it ",
                         operation->ended() ? "failed" : "has not ended"));
  return operation;
}

Status Session::Release(uint64_t handle) {
  return operations_.Remove(handle) ? Status() : UnknownHandle(handle);
}

// ---- Groups -------------------------------------------------------------------------------------

Result<OperationPtr> Session::FindChange(const std::string& key,
                                         const std::function<Result<OperationPtr>()>& make) {
  std::lock_guard lock(change_mutex_);
  if (change_ != nullptr && change_key_ == key) return change_;
  Result<OperationPtr> made = make();
  if (!made.ok()) return made;
  const Status queued = engine_->Enqueue(made.value(), /*caller_drives=*/true);
  if (!queued.ok()) return queued;
  change_ = made.value();
  change_key_ = key;
  return change_;
}

Status Session::AwaitChange(const OperationPtr& change, Deadline deadline) {
  if (!engine_->Wait(*change, deadline)) return InProgress();
  std::lock_guard lock(change_mutex_);
  if (change_ == change) change_ = nullptr;
  return change->status();
}

Status Session::AddGroup(std::vector<int> ranks, Deadline deadline, uint32_t* group) {
  std::sort(ranks.begin(), ranks.end());
  Result<OperationPtr> change =
      FindChange(StrCat("add ", JoinRanks(ranks)), [&] { return engine_->AddGroup(ranks); });
  if (!change.ok()) return change.status();
  BAGUA_RETURN_IF_ERROR(AwaitChange(change.value(), deadline));
  *group = change.value()->added;
  return {};
}

Status Session::RemoveGroup(uint32_t group, Deadline deadline) {
  Result<OperationPtr> change =
      FindChange(StrCat("remove ", group), [&] { return engine_->RemoveGroup(group); });
  if (!change.ok()) return change.status();
  return AwaitChange(change.value(), deadline);
}

// ---- Plans --------------------------------------------------------------------------------------

Status Session::StartPlan(PlanOptions options, uint64_t* ticket) {
  const uint32_t group = options.group;
  const int size = engine_->GroupSize(group);
  if (size == 0)
    return Status(StatusCode::kInvalidArgument,
                  StrCat("plan '", options.name, "': there is no process set ", group,
                         "; it was removed, or never added"));
  if (options.bucket_bytes == 0) options.bucket_bytes = engine_->config().bucket_bytes;
  Result<std::shared_ptr<Plan>> plan = Plan::Make(std::move(options), size);
  if (!plan.ok()) return plan.status();
  OperationPtr registration = engine_->RegisterPlan(plan.value(), group);
  BAGUA_RETURN_IF_ERROR(engine_->Enqueue(registration, /*caller_drives=*/true));
  *ticket = plans_.Add({plan.value(), std::move(registration)});
  return {};
}

Status Session::CreatePlan(PlanOptions options, Deadline deadline, uint64_t* ticket) {
  if (*ticket == 0) BAGUA_RETURN_IF_ERROR(StartPlan(std::move(options), ticket));
  const PlanEntry entry = plans_.Find(*ticket);
  if (entry.plan == nullptr) return UnknownPlan(*ticket);
  if (!engine_->Wait(*entry.registration, deadline)) return InProgress();
  if (!entry.registration->status().ok()) {
    plans_.Remove(*ticket);
    *ticket = 0;
  }
  return entry.registration->status();
}

Result<std::shared_ptr<Plan>> Session::FindPlan(uint64_t ticket) {
  const PlanEntry entry = plans_.Find(ticket);
  if (entry.plan == nullptr) return UnknownPlan(ticket);
  if (!entry.registration->ended())
    return Status(StatusCode::kInvalidArgument,
                  StrCat("plan '", entry.plan->name(), "' is not registered yet"));
  return entry.plan;
}

Status Session::DropPlan(uint64_t ticket) {
  const PlanEntry entry = plans_.Find(ticket);
  if (!plans_.Remove(ticket)) return UnknownPlan(ticket);
  engine_->DropPlan(entry.plan.get());
  return {};
}

}  // namespace bagua
