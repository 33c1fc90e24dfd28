#include "common/runtime/group.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/collective/shared_buckets.h"
#include "common/collective/shm_group.h"
#include "common/transport/segment.h"

namespace bagua {
namespace {

// Numbers of plans that are alive at once in one group; a number returns after so many
// registrations.
constexpr uint32_t kPlansPerGroup = 1u << 14;

}  // namespace

Group::Group(uint32_t id, GroupRanks ranks, GroupContext* context)
    : id_(id),
      ranks_(std::move(ranks)),
      context_(context),
      negotiator_(id, ranks_, *context->config, context->mesh, context->counters) {}

bool Group::shares_memory() const {
  return std::all_of(ranks_.ranks.begin(), ranks_.ranks.end(),
                     [this](int rank) { return context_->wiring->peers[rank].shares; });
}

std::vector<Doorbell*> Group::Bells() const {
  std::vector<Doorbell*> bells;
  for (const int rank : ranks_.ranks) bells.push_back(context_->wiring->peers[rank].bell.get());
  return bells;
}

Task<Status> Group::ShareSegment(uint64_t id, std::shared_ptr<Segment> own, size_t least,
                                 std::vector<std::shared_ptr<Segment>>* all) {
  Lifelines& lifelines = *context_->wiring->lifelines;
  for (int r = 0; r < ranks_.size(); ++r)
    if (r != ranks_.rank)
      BAGUA_CO_RETURN_IF_ERROR(lifelines.SendSegment(ranks_.ranks[r], id, own->fd()));
  for (int r = 0; r < ranks_.size(); ++r) {
    if (r == ranks_.rank) {
      all->push_back(own);
      continue;
    }
    const int peer = ranks_.ranks[r];
    BAGUA_CO_RETURN_IF_ERROR(co_await context_->scheduler->Until(
        [&lifelines, peer, id] { return lifelines.HasSegment(peer, id); }, peer));
    Result<std::shared_ptr<Segment>> theirs = Segment::Map(lifelines.TakeSegment(peer, id), least);
    if (!theirs.ok())
      co_return theirs.status().WithContext(
          StrCat("memory of ", context_->wiring->peers[peer].name));
    all->push_back(theirs.value());
  }
  co_return Status();
}

Task<Status> Group::MakeBackend(uint64_t segment_id, std::unique_ptr<CollectiveBackend>* backend) {
  if (ranks_.size() == 1 || !shares_memory()) {
    *backend = MakeMeshBackend(context_->mesh, ranks_, &context_->counters->copies);
    co_return Status();
  }
  const Config& config = *context_->config;
  Result<std::shared_ptr<Segment>> own = Segment::Create(ShmGroup::SegmentBytes(config));
  if (!own.ok()) co_return own.status();
  ShmGroup::Prepare(config, own.value().get());
  std::vector<std::shared_ptr<Segment>> segments;
  // A peer's segment may be smaller, if its configuration is another: Check tells.
  BAGUA_CO_RETURN_IF_ERROR(
      co_await ShareSegment(segment_id, own.value(), sizeof(ShmGroupHeader), &segments));
  auto group =
      std::make_unique<ShmGroup>(config, ranks_, std::move(segments), Bells(), context_->scheduler);
  BAGUA_CO_RETURN_IF_ERROR(group->Check());
  *backend = MakeShmBackend(std::move(group), &context_->counters->copies);
  co_return Status();
}

Task<Status> Group::Connect() {
  BAGUA_CO_RETURN_IF_ERROR(co_await MakeBackend(SegmentId(kGroupSegment, id_), &backend_));
  executor_ = std::make_unique<Executor>(ranks_, id_, backend_.get(), context_->counters);
  co_return Status();
}

Task<Status> Group::Run() {
  while (true) {
    BAGUA_CO_RETURN_IF_ERROR(
        co_await context_->scheduler->Until([this] { return negotiator_.has_units(); }));
    const AgreedUnit unit = negotiator_.TakeUnit();
    executing_ = &unit;
    since_ = Clock::now();
    const Status status = co_await RunUnit(unit);
    executing_ = nullptr;
    if (status.ok()) continue;
    for (const AgreedOperation& agreed : unit)
      if (!agreed.operation->ended())
        agreed.operation->End(status.WithContext(agreed.operation->Describe()));
    co_return status;
  }
}

Task<Status> Group::RunUnit(const AgreedUnit& unit) {
  const OperationPtr& first = unit.front().operation;
  switch (first->request.kind) {
    case Kind::kRegisterPlan:
      co_return co_await StartPlan(first);
    case Kind::kJoin:
      co_return co_await EndJoin(unit.front());
    case Kind::kAddGroup:
      co_return co_await context_->add_group(first);
    case Kind::kRemoveGroup:
      context_->remove_group(first);
      co_return Status();
    default:
      co_return co_await executor_->Run(unit, next_unit_++);
  }
}

Task<Status> Group::StartPlan(OperationPtr operation) {
  Plan& plan = *operation->plan;
  const uint32_t number = id_ * kPlansPerGroup + next_plan_++ % kPlansPerGroup;
  Plan::Exchange exchange;
  if (plan.uses_codec() || ranks_.size() == 1 || !shares_memory()) {
    BAGUA_CO_RETURN_IF_ERROR(
        co_await MakeBackend(SegmentId(kPlanSegment, number), &exchange.backend));
  } else {
    std::vector<std::shared_ptr<Segment>> segments;
    BAGUA_CO_RETURN_IF_ERROR(co_await ShareSegment(SegmentId(kPlanSegment, number), plan.segment(),
                                                   plan.segment()->bytes(), &segments));
    exchange.shared = std::make_unique<SharedBuckets>(plan.layout(), ranks_, std::move(segments),
                                                      Bells(), context_->scheduler);
  }
  plan.BeginExchange(number, std::move(exchange), context_->scheduler, context_->counters,
                     context_->plans->ObserverFor(&negotiator_));
  context_->plans->Adopt(operation->plan, &negotiator_);
  operation->End({});
  co_return Status();
}

// A step that was served here may end later than on the rank that began it.
Task<Status> Group::EndJoin(AgreedOperation agreed) {
  BAGUA_CO_RETURN_IF_ERROR(
      co_await context_->scheduler->Until([this] { return !context_->plans->serving(id_); }));
  Operation& operation = *agreed.operation;
  const auto last = static_cast<int32_t>(agreed.sizes->at(0));
  if (!operation.outputs.empty()) std::memcpy(operation.outputs[0], &last, sizeof(last));
  operation.End({});
  co_return Status();
}

std::string Group::DescribeExecuting() const {
  const AgreedUnit& unit = *executing_;
  const std::string first = unit.front().operation->Describe();
  return unit.size() == 1 ? first : StrCat(first, " and ", unit.size() - 1, " more");
}

}  // namespace bagua
