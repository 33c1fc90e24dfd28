#include "common/runtime/negotiator.h"

#include <algorithm>

#include "common/base/check.h"

namespace bagua {
namespace {

constexpr uint8_t kSubmissions = 1;
constexpr uint8_t kResponse = 2;
// The coordinator times operations out; a rank that hears nothing from it does so this much later.
Seconds CoordinatorGrace(Seconds limit) {
  return Seconds(std::clamp(limit.count() / 4, 0.5, 5.0));
}

}  // namespace

Negotiator::Negotiator(uint32_t group, GroupRanks ranks, const Config& config, Mesh* mesh,
                       Counters* counters)
    : group_(group),
      ranks_(std::move(ranks)),
      capacity_(config.cache_capacity),
      mesh_(mesh),
      counters_(counters) {
  if (coordinates()) decides_ = std::make_unique<Coordinator>(ranks_.ranks, config);
}

uint32_t Negotiator::FindKnown(const Operation& operation) const {
  if (operation.name.empty()) {
    if (id_of_signature_.empty()) return 0;
    const auto found = id_of_signature_.find(Signature(operation.request));
    return found == id_of_signature_.end() ? 0 : found->second;
  }
  const auto found = id_of_name_.find(operation.name);
  if (found == id_of_name_.end()) return 0;
  return known_.at(found->second).request == operation.request ? found->second : 0;
}

void Negotiator::Submit(OperationPtr operation) {
  if (!left_.ok()) {
    operation->End(left_.WithContext(operation->Describe()));
    return;
  }
  if (operation->name.empty()) {
    const auto failed = failed_early_.extract(operation->sequence);
    if (!failed.empty()) {
      operation->End(failed.mapped());
      return;
    }
  }
  Send(operation, false);
}

void Negotiator::Send(const OperationPtr& operation, bool in_full) {
  Submission submission;
  submission.id = in_full ? 0 : FindKnown(*operation);
  submission.sequence = operation->sequence;
  if (submission.id == 0) {
    submission.name = operation->name;
    submission.request = operation->request;
  }
  Counters::Add(submission.id == 0 ? counters_->negotiated_full : counters_->negotiated_cached);
  waiting_[{operation->name, operation->sequence}] = {operation, submission.id};
  if (operation->request.kind == Kind::kJoin) joined_ = true;
  if (coordinates()) {
    const Status fits = decides_->Receive(0, std::move(submission), operation->since, heard_);
    BAGUA_CHECK(fits.ok()) << fits.message();
    return;
  }
  Encode(submission, &batch_);
  ++batch_count_;
}

bool Negotiator::Flush() {
  if (coordinates()) {
    Response response = decides_->TakeResponse();
    if (response.empty()) return false;
    if (ranks_.size() > 1) {
      Writer message;
      message.Put(group_);
      message.Put(kResponse);
      message.PutRaw(Encode(response));
      const Bytes bytes = message.Take();
      for (int r = 1; r < ranks_.size(); ++r)
        if (!gone_.contains(ranks_.ranks[r])) mesh_->PostControl(ranks_.ranks[r], bytes);
    }
    Apply(std::move(response));
    return true;
  }
  if (batch_count_ == 0) return false;
  Writer message;
  message.Put(group_);
  message.Put(kSubmissions);
  message.Put(heard_);
  message.Put(batch_count_);
  message.PutRaw(std::exchange(batch_, {}).Take());
  batch_count_ = 0;
  mesh_->PostControl(coordinator(), message.Take());
  return true;
}

Status Negotiator::OnMessage(int peer, Reader* reader) {
  const auto type = reader->Get<uint8_t>();
  if (type == kSubmissions && coordinates()) return ReceiveSubmissions(peer, reader);
  if (type == kResponse && !coordinates() && peer == coordinator()) {
    Result<Response> response = DecodeResponse(reader);
    if (!response.ok()) return response.status();
    // What was submitted before this response says so.
    Flush();
    Apply(std::move(response).value());
    return {};
  }
  return Status(StatusCode::kInternal, StrCat("unexpected control message of type ", type));
}

Status Negotiator::ReceiveSubmissions(int peer, Reader* reader) {
  const auto place = std::find(ranks_.ranks.begin(), ranks_.ranks.end(), peer);
  if (place == ranks_.ranks.end())
    return Status(StatusCode::kInternal, StrCat("rank ", peer, " is not in group ", group_));
  const Deadline now = Clock::now();
  const auto heard = reader->Get<uint64_t>();
  const uint32_t count = reader->GetCount(12);
  for (uint32_t i = 0; i < count; ++i) {
    Result<Submission> submission = DecodeSubmission(reader);
    if (!submission.ok()) return submission.status();
    const int rank = static_cast<int>(place - ranks_.ranks.begin());
    BAGUA_RETURN_IF_ERROR(decides_->Receive(rank, std::move(submission).value(), now, heard));
  }
  return reader->Finish("submissions");
}

void Negotiator::Apply(Response response) {
  ++heard_;
  for (Renewal& renewal : response.renewals) renewals_.push_back(std::move(renewal));
  for (const int rank : response.joined)
    if (rank != ranks_.ranks[ranks_.rank] && joined_peers_.insert(rank).second)
      new_joins_.push_back(rank);
  for (Unit& unit : response.units) {
    AgreedUnit agreed;
    for (Agreement& agreement : unit.agreements) ApplyAgreement(std::move(agreement), &agreed);
    if (!agreed.empty()) units_.push_back(std::move(agreed));
  }
  // Units may name ids, or give them out, that the same response forgets.
  for (const uint32_t id : response.forgotten) Forget(id);
}

void Negotiator::ApplyAgreement(Agreement agreement, AgreedUnit* unit) {
  std::shared_ptr<const Sizes> sizes;
  if (agreement.known) {
    const auto known = known_.find(agreement.id);
    BAGUA_CHECK(known != known_.end()) << "id " << agreement.id;
    agreement.name = known->second.name;
    sizes = known->second.sizes;
  } else {
    sizes = std::make_shared<const Sizes>(std::move(agreement.sizes));
  }
  std::erase_if(renewals_,
                [&agreement](const Renewal& renewal) { return renewal.name == agreement.name; });
  last_unnamed_ = std::max(last_unnamed_, agreement.sequence);
  if (agreement.name == kJoinName) EndJoin();
  auto node = waiting_.extract({agreement.name, agreement.sequence});
  if (node.empty() && joined_) {
    if (agreement.error.ok()) unit->push_back(StandIn(std::move(agreement), std::move(sizes)));
    return;
  }
  if (node.empty()) {
    // Failed before this rank submitted it, or while it gave up by itself. Numbers are not used
    // twice: an unnamed one still has to end when it comes.
    if (agreement.sequence != 0 && !agreement.error.ok())
      failed_early_[agreement.sequence] = agreement.error;
    return;
  }
  const OperationPtr operation = std::move(node.mapped().operation);
  if (!agreement.error.ok()) {
    operation->End(agreement.error);
    return;
  }
  if (!agreement.known && agreement.id != 0) Remember(agreement, *operation, sizes);
  unit->push_back({operation, std::move(sizes), false});
}

void Negotiator::EndJoin() {
  joined_ = false;
  joined_peers_.clear();
  new_joins_.clear();
  unnamed_at_join_ = last_unnamed_;
  // All these numbers are used up.
  failed_early_.clear();
}

AgreedOperation Negotiator::StandIn(Agreement agreement, std::shared_ptr<const Sizes> sizes) const {
  auto operation = std::make_shared<Operation>();
  BAGUA_CHECK(agreement.known || agreement.served) << "'" << agreement.name << "' cannot be served";
  operation->request =
      agreement.known ? known_.at(agreement.id).request : std::move(*agreement.served);
  operation->name = std::move(agreement.name);
  operation->sequence = agreement.sequence;
  return {std::move(operation), std::move(sizes), true};
}

void Negotiator::Remember(const Agreement& agreement, const Operation& operation,
                          std::shared_ptr<const Sizes> sizes) {
  Known& known = known_[agreement.id];
  known = {operation.name, operation.request, std::move(sizes), {}};
  if (operation.name.empty()) {
    known.signature = Signature(operation.request);
    id_of_signature_[known.signature] = agreement.id;
  } else {
    id_of_name_[operation.name] = agreement.id;
  }
}

void Negotiator::Forget(uint32_t id) {
  auto node = known_.extract(id);
  if (!node.empty()) {
    const Known& known = node.mapped();
    const auto drop = [id](auto* index, const std::string& key) {
      const auto found = index->find(key);
      if (found != index->end() && found->second == id) index->erase(found);
    };
    drop(&id_of_name_, known.name);
    drop(&id_of_signature_, known.signature);
  }
  // The coordinator dropped submissions that named the id after it forgot it.
  std::vector<OperationPtr> again;
  for (const auto& [key, waiting] : waiting_)
    if (waiting.id == id) again.push_back(waiting.operation);
  for (const OperationPtr& operation : again) Send(operation, true);
}

AgreedUnit Negotiator::TakeUnit() {
  AgreedUnit unit = std::move(units_.front());
  units_.pop_front();
  return unit;
}

void Negotiator::Leave(int peer, const Status& reason) {
  const auto place = std::find(ranks_.ranks.begin(), ranks_.ranks.end(), peer);
  if (place == ranks_.ranks.end()) return;
  gone_.insert(peer);
  if (coordinates()) {
    decides_->Leave(static_cast<int>(place - ranks_.ranks.begin()), reason);
  } else if (peer == coordinator()) {
    left_ = reason;
    joined_ = false;
    for (auto& [key, waiting] : std::exchange(waiting_, {}))
      waiting.operation->End(reason.WithContext(waiting.operation->Describe()));
  }
}

void Negotiator::FailAll(const Status& reason) {
  left_ = reason;
  joined_ = false;
  for (auto& [key, waiting] : std::exchange(waiting_, {}))
    waiting.operation->End(reason.WithContext(waiting.operation->Describe()));
  for (AgreedUnit& unit : std::exchange(units_, {}))
    for (AgreedOperation& agreed : unit)
      agreed.operation->End(reason.WithContext(agreed.operation->Describe()));
}

// `waiting_` on a rank that does not coordinate.
Status Negotiator::CheckCoordinator(Deadline submitted_before, Deadline progressed,
                                    Seconds patience) const {
  for (const auto& [key, waiting] : waiting_) {
    const bool joins = waiting.operation->request.kind == Kind::kJoin;
    const Deadline since =
        joins ? std::max(waiting.operation->since, progressed) : waiting.operation->since;
    if (since <= submitted_before)
      return Status(StatusCode::kTimeout,
                    StrCat(waiting.operation->Describe(), " waited ", patience.count(),
                           " s for rank ", coordinator(),
                           ", which decides the order of operations and does not answer. Set "
                           "BAGUA_TIMEOUT_SECONDS to wait longer."));
  }
  return {};
}

Status Negotiator::CheckStalls(Deadline now, Deadline progressed, const Config& config,
                               std::vector<std::string>* warnings) {
  const auto before = [now](Seconds delay) {
    return now - std::chrono::duration_cast<Clock::duration>(delay);
  };
  const Seconds warn(config.stall_warning_seconds);
  const Seconds limit(config.timeout_seconds);
  if (!coordinates()) {
    if (limit.count() <= 0) return {};
    const Seconds patience = limit + CoordinatorGrace(limit);
    return CheckCoordinator(before(patience), progressed, patience);
  }
  decides_->NoteProgress(progressed);
  if (warn.count() > 0) {
    for (const Stall& stall : decides_->Stalls(before(warn)))
      if (stall.since > warned_)
        warnings->push_back(StrCat(
            stall.what, " waits since ", static_cast<int64_t>(Seconds(now - stall.since).count()),
            " s for ", JoinRanks(stall.missing),
            ", which did not submit it. BAGUA_STALL_WARNING_SECONDS "
            "sets when this warning comes, BAGUA_TIMEOUT_SECONDS when it is an error."));
    warned_ = std::max(warned_, before(warn));
  }
  if (limit.count() > 0) decides_->TimeOut(before(limit), limit.count());
  return {};
}

}  // namespace bagua
