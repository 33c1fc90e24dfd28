// Engine: how groups begin and end.
#include <algorithm>
#include <utility>

#include "common/base/check.h"
#include "common/runtime/engine.h"

namespace bagua {
namespace {

Status CheckMembers(const std::vector<int>& ranks, int size) {
  const auto invalid = [](const std::string& what) {
    return Status(StatusCode::kInvalidArgument, StrCat(Name(Kind::kAddGroup), ": ", what));
  };
  if (ranks.empty()) return invalid("a process set needs at least one rank");
  for (const int rank : {ranks.front(), ranks.back()})
    if (rank < 0 || rank >= size)
      return invalid(StrCat("there is no rank ", rank, "; ranks are 0 to ", size - 1));
  const auto twice = std::adjacent_find(ranks.begin(), ranks.end());
  if (twice != ranks.end()) return invalid(StrCat("rank ", *twice, " is given twice"));
  return {};
}

OperationPtr MakeChange(Kind kind, std::string which) {
  auto operation = std::make_shared<Operation>();
  operation->request.kind = kind;
  operation->request.details.push_back(std::move(which));
  operation->name = kGroupChangeName;
  return operation;
}

GroupRanks PlaceAmong(std::vector<int> ranks, int rank) {
  const auto own = std::find(ranks.begin(), ranks.end(), rank);
  BAGUA_CHECK(own != ranks.end()) << "rank " << rank << " is not among " << JoinRanks(ranks);
  const int place = static_cast<int>(own - ranks.begin());
  return {std::move(ranks), place};
}

}  // namespace

// ---- The group of all ranks ---------------------------------------------------------------------

Status Engine::MeetEveryone(Deadline deadline) {
  std::vector<int> everyone;
  for (int r = 0; r < size(); ++r) everyone.push_back(r);
  Group* const group = loop_.AsDriver([&] {
    LiveGroup& live = groups_[0];
    live.group = std::make_unique<Group>(0, PlaceAmong(everyone, rank()), &context_);
    return live.group.get();
  });
  BAGUA_RETURN_IF_ERROR(Connect(group, deadline));
  {
    std::lock_guard lock(mutex_);
    group_entries_[0].ranks = std::move(everyone);
  }
  return loop_.AsDriver([&] {
    const Status begun = BeginGroup(0);
    if (!begun.ok() && failure_.ok()) Abort(begun);
    return begun;
  });
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

// Its members have met.
Status Engine::BeginGroup(uint32_t id) {
  LiveGroup& live = groups_.at(id);
  live.run = live.group->Run();
  live.connected = true;
  const auto early = early_.extract(id);
  if (early.empty()) return {};
  for (const Mesh::Control& control : early.mapped()) BAGUA_RETURN_IF_ERROR(OnControl(control));
  return {};
}

// ---- Adding -------------------------------------------------------------------------------------

Result<OperationPtr> Engine::AddGroup(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  const Status fits = CheckMembers(ranks, size());
  if (!fits.ok()) return fits;
  OperationPtr operation = MakeChange(Kind::kAddGroup, JoinRanks(ranks));
  operation->ranks = std::move(ranks);
  return operation;
}

Task<Status> Engine::MakeGroup(OperationPtr operation) {
  const uint32_t id = last_group_ + 1;
  if (id >= kFirstPlanChannel) {
    operation->End(Status(StatusCode::kInvalidArgument,
                          StrCat(operation->Describe(), ": ", last_group_,
                                 " process sets were added; call shutdown and init to go on")));
    co_return Status();
  }
  last_group_ = id;
  const std::vector<int>& ranks = operation->ranks;
  if (std::binary_search(ranks.begin(), ranks.end(), rank())) {
    LiveGroup& live = groups_[id];
    live.group = std::make_unique<Group>(id, PlaceAmong(ranks, rank()), &context_);
    BAGUA_CO_RETURN_IF_ERROR(co_await live.group->Connect());
    BAGUA_CO_RETURN_IF_ERROR(BeginGroup(id));
  }
  {
    std::lock_guard lock(mutex_);
    group_entries_[id].ranks = ranks;
  }
  operation->added = id;
  operation->End({});
  co_return Status();
}

// ---- Removal ------------------------------------------------------------------------------------

Result<OperationPtr> Engine::RemoveGroup(uint32_t group) {
  const auto invalid = [](const std::string& what) {
    return Status(StatusCode::kInvalidArgument, StrCat(Name(Kind::kRemoveGroup), ": ", what));
  };
  if (group == 0) return invalid("the set of all ranks cannot be removed");
  std::vector<int> ranks;
  {
    std::lock_guard lock(mutex_);
    const auto entry = group_entries_.find(group);
    if (entry == group_entries_.end())
      return invalid(StrCat("there is no process set ", group, "; it was removed, or never added"));
    ranks = entry->second.ranks;
  }
  OperationPtr operation =
      MakeChange(Kind::kRemoveGroup, StrCat("process set ", group, " (", JoinRanks(ranks), ")"));
  operation->removes = group;
  loop_.AsDriver([&] {
    for (const std::shared_ptr<Plan>& plan : plans_.plans())
      if (plan->group() == group && !plan->dropped() && plan->exchanging())
        operation->request.details.push_back(plan->DescribeExchange());
  });
  return operation;
}

// With mutex_ held.
Status Engine::AdmitRemoval(Operation* operation) {
  const auto found = group_entries_.find(operation->removes);
  if (found == group_entries_.end())
    return Status(StatusCode::kInvalidArgument, StrCat(operation->Describe(), ": process set ",
                                                       operation->removes, " was removed"));
  for (const auto& [key, kind] : found->second.in_flight)
    operation->request.details.push_back(DescribeOperation(kind, key.name, key.sequence));
  found->second.removing = true;
  return {};
}

void Engine::EndGroup(const OperationPtr& operation) {
  const uint32_t id = operation->removes;
  {
    std::lock_guard lock(mutex_);
    group_entries_.erase(id);
  }
  const Status removed(StatusCode::kInvalidArgument,
                       operation->request.details[0] + " was removed");
  plans_.EndGroup(id, removed);
  ended_groups_.push_back(id);
  operation->End({});
}

// ---- Questions ----------------------------------------------------------------------------------

int Engine::GroupSize(uint32_t group) {
  std::lock_guard lock(mutex_);
  const auto found = group_entries_.find(group);
  return found == group_entries_.end() ? 0 : static_cast<int>(found->second.ranks.size());
}

int Engine::GroupRank(uint32_t group) {
  std::lock_guard lock(mutex_);
  const auto found = group_entries_.find(group);
  if (found == group_entries_.end()) return -1;
  const std::vector<int>& ranks = found->second.ranks;
  const auto own = std::lower_bound(ranks.begin(), ranks.end(), rank());
  return own == ranks.end() || *own != rank() ? -1 : static_cast<int>(own - ranks.begin());
}

}  // namespace bagua
