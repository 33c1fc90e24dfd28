#include "common/runtime/coordinator.h"

#include <algorithm>
#include <utility>

#include "common/base/check.h"

namespace bagua {
namespace {

// Operations with equal keys can share a collective; "" shares with none.
std::string FusionKey(const Request& request) {
  if (request.kind != Kind::kAllreduce || request.tensors.empty()) return {};
  const TensorMeta& first = request.tensors[0];
  for (const TensorMeta& tensor : request.tensors)
    if (tensor.dtype != first.dtype || tensor.device != first.device) return {};
  Writer writer;
  writer.Put(request.op);
  writer.Put(first.dtype);
  writer.Put(static_cast<int32_t>(first.device));
  writer.Put(request.prescale);
  writer.Put(request.postscale);
  const Bytes bytes = writer.Take();
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

size_t TotalBytes(const Request& request) {
  size_t bytes = 0;
  for (const TensorMeta& tensor : request.tensors) bytes += tensor.bytes();
  return bytes;
}

// Whether an alltoall's splits cut its rows for `size` ranks.
bool SplitsFit(const Request& request, size_t size) {
  if (request.kind != Kind::kAlltoall) return true;
  if (request.tensors.size() != 1 || request.splits.size() != size) return false;
  int64_t left = request.tensors[0].shape.rows();
  for (const int64_t rows : request.splits) {
    if (rows < 0 || rows > left) return false;
    left -= rows;
  }
  return left == 0;
}

}  // namespace

Coordinator::Coordinator(std::vector<int> ranks, const Config& config)
    : ranks_(std::move(ranks)),
      capacity_(config.cache_capacity),
      fusion_bytes_(config.fusion_bytes),
      ended_without_(ranks_.size()),
      dropped_(ranks_.size()),
      joined_(ranks_.size()),
      repeats_(ranks_.size()) {}

Status Coordinator::Receive(int rank, Submission submission, Deadline now, uint64_t heard) {
  Key key{submission.name, submission.sequence};
  if (submission.request.kind == Kind::kJoin && submission.name != kJoinName)
    return Status(StatusCode::kInternal,
                  StrCat("rank ", ranks_[rank], " joined under the name '", submission.name, "'"));
  if (!SplitsFit(submission.request, ranks_.size()))
    return Status(StatusCode::kInternal,
                  StrCat("rank ", ranks_[rank], " submitted an alltoall whose splits do not fit"));
  if (submission.id != 0) {
    const auto known = known_.find(submission.id);
    // Forgotten meanwhile: the rank submits in full once it learns of it.
    if (known == known_.end()) {
      dropped_[rank] = told_ + 1;
      return {};
    }
    if (known->second.name.empty() != (submission.sequence != 0))
      return Status(StatusCode::kInternal, StrCat("rank ", ranks_[rank], " submitted id ",
                                                  submission.id, " under a wrong number"));
    key.name = known->second.name;
  }
  std::erase_if(ended_without_[rank], [heard](const auto& late) { return late.second <= heard; });
  if (ended_without_[rank].contains(key)) return {};
  if (submission.id != 0) ++known_.at(submission.id).pending;
  Pending& pending = pending_[key];
  if (pending.submissions.empty()) {
    pending.submissions.resize(ranks_.size());
    pending.submitted.resize(ranks_.size());
    pending.since = now;
  }
  if (pending.submitted[rank])
    return Status(StatusCode::kInternal,
                  StrCat("rank ", ranks_[rank], " submitted '", key.name, "' twice at once"));
  if (submission.request.position.size() == 2)
    response_.renewals.push_back({ranks_[rank], key.name,
                                  static_cast<uint32_t>(submission.request.position[0]),
                                  static_cast<uint64_t>(submission.request.position[1])});
  const bool joins = submission.request.kind == Kind::kJoin;
  pending.submissions[rank] = std::move(submission);
  pending.submitted[rank] = true;
  pending.last = rank;
  ++pending.count;
  if (joins && left_.ok()) Join(rank, heard);
  if (!left_.ok() || IsComplete(pending)) {
    auto node = pending_.extract(key);
    Complete(key, std::move(node.mapped()));
  }
  return {};
}

// ---- Joining ------------------------------------------------------------------------------------

void Coordinator::Join(int rank, uint64_t heard) {
  joined_[rank] = true;
  repeats_[rank] = heard < dropped_[rank];
  ++joined_count_;
  response_.joined.push_back(ranks_[rank]);
  std::vector<Key> complete;
  for (const auto& [key, pending] : pending_)
    if (key.name != kJoinName && IsComplete(pending)) complete.push_back(key);
  for (const Key& key : complete) {
    auto node = pending_.extract(key);
    Complete(key, std::move(node.mapped()));
  }
}

void Coordinator::EndJoin() {
  joined_.assign(ranks_.size(), false);
  repeats_.assign(ranks_.size(), false);
  joined_count_ = 0;
}

void Coordinator::NoteProgress(Deadline at) {
  if (joined_count_ == 0) return;
  Pending& join = pending_.at({kJoinName, 0});
  join.since = std::max(join.since, at);
}

bool Coordinator::IsComplete(const Pending& pending) const {
  if (pending.count == static_cast<int>(ranks_.size())) return true;
  if (joined_count_ == 0) return false;
  for (size_t r = 0; r < ranks_.size(); ++r)
    if (!pending.submitted[r] && !joined_[r]) return false;
  return true;
}

Status Coordinator::CheckServable(const Key& key, const Pending& pending) {
  const auto first = std::find(pending.submitted.begin(), pending.submitted.end(), true);
  const Request& request =
      RequestOf(pending, static_cast<size_t>(first - pending.submitted.begin()));
  if (request.kind == Kind::kAllreduce &&
      (request.op == ReduceOp::kSum || request.op == ReduceOp::kAverage)) {
    for (size_t r = 0; r < ranks_.size(); ++r)
      if (!pending.submitted[r] && repeats_[r]) ended_without_[r][key] = told_ + 1;
    return {};
  }
  const std::vector<int> joined = Missing(pending);
  return Status(StatusCode::kMismatch,
                StrCat(DescribeOperation(request.kind, key.name, key.sequence), ": ",
                       JoinRanks(joined), joined.size() == 1 ? " has" : " have",
                       " joined. Until all ranks have, only allreduces with op Sum or Average are "
                       "possible; submit anything else before the first join or after the last."));
}

// ---- Agreeing -----------------------------------------------------------------------------------

void Coordinator::Complete(const Key& key, Pending pending) {
  if (!left_.ok()) {
    Fail(key, pending, left_);
    return;
  }
  if (key.name == kJoinName) EndJoin();
  ReleaseIds(pending);
  Request first;
  Agreement agreement = Agree(key, pending, &first);
  AddToUnits(std::move(agreement), first);
}

void Coordinator::ReleaseIds(const Pending& pending) {
  for (const Submission& submission : pending.submissions)
    if (const auto known = known_.find(submission.id); known != known_.end())
      --known->second.pending;
}

Agreement Coordinator::Agree(const Key& key, Pending& pending, Request* first) {
  Agreement agreement;
  agreement.name = key.name;
  agreement.sequence = key.sequence;
  const bool whole = pending.count == static_cast<int>(ranks_.size());
  if (!whole) agreement.error = CheckServable(key, pending);
  if (!agreement.error.ok()) return agreement;
  if (const uint32_t id = CommonId(pending); id != 0) {
    Known& known = known_.at(id);
    uses_.splice(uses_.end(), uses_, known.use);
    agreement.id = id;
    agreement.known = true;
    *first = known.requests[0];
    return agreement;
  }
  std::vector<Request> requests;
  std::vector<int> from;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (!pending.submitted[r]) continue;
    Submission& submission = pending.submissions[r];
    requests.push_back(submission.id != 0 ? known_.at(submission.id).requests[r]
                                          : std::move(submission.request));
    from.push_back(ranks_[r]);
  }
  const std::string what = DescribeOperation(requests[0].kind, key.name, key.sequence);
  Result<Sizes> sizes = Reconcile(what, requests, from);
  if (!sizes.ok()) {
    agreement.error = sizes.status();
    return agreement;
  }
  agreement.sizes = sizes.value();
  *first = requests[0];
  if (first->kind == Kind::kJoin) agreement.sizes = {ranks_[pending.last]};
  if (!whole)
    agreement.served = *first;
  else if (TakesTensors(first->kind) || first->kind == Kind::kBarrier)
    agreement.id = Remember(key, std::move(requests), agreement.sizes);
  return agreement;
}

const Request& Coordinator::RequestOf(const Pending& pending, size_t rank) const {
  const Submission& submission = pending.submissions[rank];
  return submission.id != 0 ? known_.at(submission.id).requests[rank] : submission.request;
}

uint32_t Coordinator::CommonId(const Pending& pending) const {
  uint32_t common = 0;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (!pending.submitted[r]) continue;
    const uint32_t id = pending.submissions[r].id;
    if (id == 0 || (common != 0 && id != common)) return 0;
    common = id;
  }
  return common;
}

uint32_t Coordinator::Remember(const Key& key, std::vector<Request> requests, const Sizes& sizes) {
  if (capacity_ == 0) return 0;
  // The name stands for something else from here on.
  if (!key.name.empty())
    if (const auto old = id_of_name_.find(key.name); old != id_of_name_.end()) Forget(old->second);
  if (known_.size() >= capacity_) {
    const auto idle = std::find_if(uses_.begin(), uses_.end(),
                                   [this](uint32_t id) { return known_.at(id).pending == 0; });
    if (idle == uses_.end()) return 0;
    Forget(*idle);
  }
  const uint32_t id = next_id_++;
  uses_.push_back(id);
  known_[id] = Known{key.name, std::move(requests), sizes, std::prev(uses_.end()), 0};
  if (!key.name.empty()) id_of_name_[key.name] = id;
  return id;
}

void Coordinator::Forget(uint32_t id) {
  const auto known = known_.find(id);
  uses_.erase(known->second.use);
  id_of_name_.erase(known->second.name);
  known_.erase(known);
  response_.forgotten.push_back(id);
}

void Coordinator::AddToUnits(Agreement agreement, const Request& request) {
  const std::string key = agreement.error.ok() ? FusionKey(request) : "";
  const size_t bytes = TotalBytes(request);
  if (!key.empty()) {
    for (Open& open : open_) {
      if (open.key != key || open.bytes + bytes > fusion_bytes_) continue;
      open.bytes += bytes;
      response_.units[open.unit].agreements.push_back(std::move(agreement));
      return;
    }
    if (bytes < fusion_bytes_) open_.push_back({key, response_.units.size(), bytes});
  }
  response_.units.emplace_back().agreements.push_back(std::move(agreement));
}

void Coordinator::Fail(const Key& key, const Pending& pending, const Status& error) {
  Agreement agreement;
  agreement.name = key.name;
  agreement.sequence = key.sequence;
  agreement.error = error.WithContext(DescribePending(key, pending));
  if (key.name == kJoinName) EndJoin();
  ReleaseIds(pending);
  AddToUnits(std::move(agreement), Request{});
}

Response Coordinator::TakeResponse() {
  open_.clear();
  if (!response_.empty()) ++told_;
  return std::exchange(response_, {});
}

std::string Coordinator::DescribePending(const Key& key, const Pending& pending) const {
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (!pending.submitted[r]) continue;
    return DescribeOperation(RequestOf(pending, r).kind, key.name, key.sequence);
  }
  return key.name;
}

std::vector<int> Coordinator::Missing(const Pending& pending) const {
  std::vector<int> missing;
  for (size_t r = 0; r < ranks_.size(); ++r)
    if (!pending.submitted[r]) missing.push_back(ranks_[r]);
  return missing;
}

void Coordinator::Leave(int rank, const Status& reason) {
  if (left_.ok()) left_ = reason;
  std::vector<Key> waiting;
  for (const auto& [key, pending] : pending_)
    if (!pending.submitted[rank]) waiting.push_back(key);
  for (const Key& key : waiting) {
    auto node = pending_.extract(key);
    Fail(key, node.mapped(), left_);
  }
}

std::vector<Stall> Coordinator::Stalls(Deadline submitted_before) const {
  std::vector<Stall> stalls;
  for (const auto& [key, pending] : pending_)
    if (pending.since <= submitted_before)
      stalls.push_back({DescribePending(key, pending), Missing(pending), pending.since});
  return stalls;
}

void Coordinator::TimeOut(Deadline submitted_before, double seconds) {
  std::vector<Key> late;
  for (const auto& [key, pending] : pending_)
    if (pending.since <= submitted_before) late.push_back(key);
  for (const Key& key : late) {
    auto node = pending_.extract(key);
    const std::string missing = JoinRanks(Missing(node.mapped()));
    for (size_t r = 0; r < ranks_.size(); ++r)
      if (!node.mapped().submitted[r]) ended_without_[r][key] = told_ + 1;
    Fail(key, node.mapped(),
         Status(StatusCode::kTimeout,
                StrCat("waited ", seconds, " s for ", missing,
                       " (never submitted it). Set BAGUA_TIMEOUT_SECONDS to wait longer.")));
  }
}

}  // namespace bagua
