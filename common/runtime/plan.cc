#include "common/runtime/plan.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "common/base/check.h"
#include "common/base/half.h"

namespace bagua {
namespace {

template <class T>
void Put(T value, std::byte* dst) {
  std::memcpy(dst, &value, sizeof(T));
}

void PutFloating(DType dtype, double value, std::byte* dst) {
  const auto single = static_cast<float>(value);
  switch (dtype) {
    case DType::kFloat16:
      return Put(ToHalf(single), dst);
    case DType::kBfloat16:
      return Put(ToBfloat16(single), dst);
    case DType::kFloat32:
      return Put(single, dst);
    case DType::kFloat64:
      return Put(value, dst);
    default:
      BAGUA_CHECK(false) << Name(dtype);
  }
}

// Whether the floating value at `src` is not zero of either sign.
bool IsNonZero(DType dtype, const std::byte* src) {
  const size_t bytes = SizeOf(dtype);
  for (size_t i = 0; i + 1 < bytes; ++i)
    if (src[i] != std::byte{0}) return true;
  return (src[bytes - 1] & std::byte{0x7f}) != std::byte{0};
}

// The value behind a bucket that says "ready": after scaling it is at least 1, whatever the
// factors.
double UsedFlag(const Scaling& scaling) {
  const double factor = std::abs(scaling.pre * scaling.post / static_cast<double>(scaling.divisor));
  return factor > 0 && factor < 1 ? 1 / factor : 1;
}

Status CheckOptions(const PlanOptions& options) {
  if (options.op != ReduceOp::kAverage && options.op != ReduceOp::kSum)
    return Status(StatusCode::kInvalidArgument,
                  StrCat("plan '", options.name, "': op ", Name(options.op),
                         " is not supported; use Average or Sum"));
  // A factor of 0 would also wipe out which tensors were used.
  const double factor = options.prescale * options.postscale;
  if (!std::isfinite(options.prescale) || !std::isfinite(options.postscale) || factor == 0)
    return Status(StatusCode::kInvalidArgument,
                  StrCat("plan '", options.name, "': prescale ", options.prescale,
                         " and postscale ", options.postscale, " must be finite and not 0"));
  return {};
}

std::vector<BucketShape> ShapesOf(const BucketPlan& plan) {
  std::vector<BucketShape> shapes;
  for (const Bucket& bucket : plan.buckets) shapes.push_back({bucket.dtype, bucket.count()});
  return shapes;
}

}  // namespace

Result<std::shared_ptr<Plan>> Plan::Make(PlanOptions options, int group_size) {
  const Status fits = CheckOptions(options);
  if (!fits.ok()) return fits;
  const Result<const Codec*> found = FindCodec(options.codec);
  if (!found.ok()) return found.status().WithContext(StrCat("plan '", options.name, "'"));
  Result<const Codec*> codec = found;
  Result<BucketPlan> plan = PlanBuckets(options.tensors, options.bucket_bytes, options.bucket_of);
  if (!plan.ok()) return plan.status().WithContext(StrCat("plan '", options.name, "'"));
  BucketLayout layout = BucketLayout::Of(ShapesOf(plan.value()), group_size);
  Result<std::shared_ptr<Segment>> segment = Segment::Create(layout.bytes);
  if (!segment.ok())
    return segment.status().WithContext(StrCat("memory for plan '", options.name, "'"));
  const Codec* const lossy = options.codec == "none" ? nullptr : codec.value();
  return std::shared_ptr<Plan>(new Plan(std::move(options), std::move(plan).value(), lossy,
                                        std::move(layout), std::move(segment).value(), group_size));
}

Plan::Plan(PlanOptions options, BucketPlan plan, const Codec* codec, BucketLayout layout,
           std::shared_ptr<Segment> segment, int group_size)
    : options_(std::move(options)),
      plan_(std::move(plan)),
      codec_(codec),
      layout_(std::move(layout)),
      segment_(std::move(segment)),
      scaling_{options_.prescale, options_.postscale,
               options_.op == ReduceOp::kAverage ? group_size : 1},
      used_flag_(UsedFlag(scaling_)),
      ready_(new std::atomic<uint8_t>[options_.tensors.size()]()),
      remaining_(new std::atomic<uint32_t>[plan_.buckets.size()]()),
      published_(new std::atomic<uint64_t>[plan_.buckets.size()]()),
      used_(options_.tensors.size()) {
  for (size_t b = 0; b < plan_.buckets.size(); ++b)
    remaining_[b].store(static_cast<uint32_t>(plan_.buckets[b].tensor_count));
  missing_buckets_.store(plan_.buckets.size());
}

std::vector<std::string> Plan::Details() const {
  std::vector<std::string> lines = {
      StrCat("op=", Name(options_.op)), StrCat("prescale_factor=", ExactText(options_.prescale)),
      StrCat("postscale_factor=", ExactText(options_.postscale)), StrCat("codec=", options_.codec),
      StrCat("bucket_bytes=", options_.bucket_bytes)};
  if (!options_.agreed.empty()) lines.push_back(options_.agreed);
  for (size_t i = 0; i < options_.tensors.size(); ++i)
    lines.push_back(StrCat("tensor ", i, ": '", options_.tensors[i].name, "' ",
                           Describe(options_.tensors[i].meta), " in bucket ",
                           plan_.places[i].bucket));
  return lines;
}

void Plan::BeginExchange(uint32_t number, Exchange exchange, Scheduler* scheduler,
                         Counters* counters, Observer observer) {
  number_ = number;
  exchange_ = std::move(exchange);
  scheduler_ = scheduler;
  counters_ = counters;
  observer_ = std::move(observer);
  registered_.store(true, std::memory_order_release);
}

Task<Status> Plan::Run() {
  if (plan_.buckets.empty()) co_return Status();
  for (uint64_t step = 1;; ++step) {
    for (size_t b = 0; b < plan_.buckets.size(); ++b) {
      const std::atomic<uint64_t>& published = published_[b];
      BAGUA_CO_RETURN_IF_ERROR(co_await scheduler_->Until(
          [&published, step] { return published.load(std::memory_order_acquire) >= step; }));
      exchange_since_ = Clock::now();
      if (b == 0) {
        steps_begun_ = step;
        observer_.began(*this);
      }
      BAGUA_CO_RETURN_IF_ERROR(co_await ExchangeBucket(b));
      // Else the next bucket would count, until it is taken up, as waiting since this one began.
      exchange_since_ = kForever;
      exchanged_.fetch_add(1, std::memory_order_release);
      Counters::Add(counters_->plan_buckets);
      Counters::Add(counters_->plan_bytes, static_cast<int64_t>(plan_.buckets[b].bytes()));
      observer_.progressed();
    }
  }
}

Reduction Plan::HowTo(DType dtype) const {
  return {dtype, ReduceOp::kSum, scaling_};
}

Task<Status> Plan::ExchangeBucket(size_t bucket) {
  const uint64_t step = step_.load(std::memory_order_acquire);
  const Bucket& shape = plan_.buckets[bucket];
  if (exchange_.shared != nullptr)
    co_return co_await exchange_.shared->Allreduce(bucket, step, HowTo(shape.dtype));
  const Tag tag{kFirstPlanChannel + number_, static_cast<uint32_t>(bucket), step};
  if (codec_ != nullptr && codec_->encoded_dtype(shape.dtype) != shape.dtype)
    co_return co_await ExchangeEncoded(bucket, tag);
  std::byte* const data = bucket_data(bucket);
  const Piece piece{data, data, shape.count()};
  const Pieces pieces(std::span(&piece, 1), SizeOf(shape.dtype));
  co_return co_await exchange_.backend->Allreduce(tag, pieces, HowTo(shape.dtype));
}

Task<Status> Plan::ExchangeEncoded(size_t bucket, Tag tag) {
  const Bucket& shape = plan_.buckets[bucket];
  const DType encoded_dtype = codec_->encoded_dtype(shape.dtype);
  encoded_.resize(codec_->EncodedBytes(shape.dtype, shape.count()));
  codec_->Encode(shape.dtype, bucket_data(bucket), shape.count(), encoded_);
  const Piece piece{encoded_.data(), encoded_.data(), shape.count()};
  const Pieces pieces(std::span(&piece, 1), SizeOf(encoded_dtype));
  BAGUA_CO_RETURN_IF_ERROR(
      co_await exchange_.backend->Allreduce(tag, pieces, HowTo(encoded_dtype)));
  codec_->Decode(shape.dtype, encoded_, shape.count(), bucket_data(bucket));
  co_return Status();
}

void Plan::Fail(const Status& reason) {
  {
    std::lock_guard lock(failure_mutex_);
    if (!failure_.ok()) return;
    failure_ = reason;
  }
  // Without memory for a private copy the shared pages stay; nobody reads meaning into them. What
  // the user writes after hearing of the failure must not be lost to the copy: it comes first.
  [[maybe_unused]] const Status kept = segment_->MakePrivate();
  failed_.store(true, std::memory_order_release);
}

Status Plan::failure() const {
  if (!failed()) return {};
  std::lock_guard lock(failure_mutex_);
  return failure_.WithContext(StrCat("plan '", options_.name, "'"));
}

std::byte* Plan::flag(size_t tensor) const {
  const TensorPlace& place = plan_.places[tensor];
  const Bucket& bucket = plan_.buckets[place.bucket];
  const size_t index = bucket.value_count + (tensor - bucket.first_tensor);
  return bucket_data(place.bucket) + index * SizeOf(bucket.dtype);
}

DType Plan::dtype_of(size_t tensor) const {
  return plan_.buckets[plan_.places[tensor].bucket].dtype;
}

void Plan::CountDown(size_t bucket, bool* published) {
  if (remaining_[bucket].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const uint64_t step = step_.load(std::memory_order_acquire);
  if (exchange_.shared != nullptr) exchange_.shared->Publish(bucket, step);
  missing_buckets_.fetch_sub(1, std::memory_order_acq_rel);
  published_[bucket].store(step, std::memory_order_release);
  *published = true;
}

Status Plan::MakeReady(size_t tensor, bool* published) {
  if (failed()) return failure();
  if (tensor >= tensor_count())
    return Status(
        StatusCode::kInvalidArgument,
        StrCat("plan '", options_.name, "' has ", tensor_count(), " tensors, no tensor ", tensor));
  if (ready_[tensor].exchange(1, std::memory_order_acq_rel) != 0)
    return Status(StatusCode::kInvalidArgument,
                  StrCat("plan '", options_.name, "': tensor '", options_.tensors[tensor].name,
                         "' was made ready twice in one step"));
  PutFloating(dtype_of(tensor), used_flag_, flag(tensor));
  CountDown(plan_.places[tensor].bucket, published);
  return {};
}

Result<bool> Plan::BeginFinish() {
  if (failed()) return failure();
  if (std::exchange(finishing_, true)) return false;
  const size_t n = plan_.buckets.size();
  const uint64_t before = (step_.load(std::memory_order_relaxed) - 1) * n;
  const uint64_t early = exchanged_.load(std::memory_order_acquire) - before;
  for (size_t b = 0; b < n; ++b) {
    const auto bytes = static_cast<int64_t>(plan_.buckets[b].bytes());
    total_bytes_ += bytes;
    if (b < early) overlapped_bytes_ += bytes;
  }
  bool published = false;
  for (size_t i = 0; i < tensor_count(); ++i) {
    if (ready_[i].exchange(1, std::memory_order_acq_rel) != 0) continue;
    const TensorPlace& place = plan_.places[i];
    const size_t each = SizeOf(plan_.buckets[place.bucket].dtype);
    std::memset(bucket_data(place.bucket) + place.offset * each, 0, place.count * each);
    PutFloating(dtype_of(i), 0, flag(i));
    CountDown(place.bucket, &published);
  }
  return true;
}

bool Plan::StepDone() const {
  return failed() || exchanged_.load(std::memory_order_acquire) >=
                         step_.load(std::memory_order_relaxed) * plan_.buckets.size();
}

Status Plan::EndFinish() {
  finishing_ = false;
  if (failed()) return failure();
  for (size_t i = 0; i < tensor_count(); ++i) {
    used_[i] = IsNonZero(dtype_of(i), flag(i)) ? 1 : 0;
    ready_[i].store(0, std::memory_order_relaxed);
  }
  for (size_t b = 0; b < plan_.buckets.size(); ++b)
    remaining_[b].store(static_cast<uint32_t>(plan_.buckets[b].tensor_count),
                        std::memory_order_relaxed);
  missing_buckets_.store(plan_.buckets.size(), std::memory_order_relaxed);
  step_.fetch_add(1, std::memory_order_release);
  return {};
}

void Plan::BeginService() {
  serving_.store(true, std::memory_order_release);
  // A plan that failed is not served to its end; whoever waits for the service sees that.
  [[maybe_unused]] const Result<bool> begun = BeginFinish();
}

bool Plan::EndService() {
  if (!StepDone()) return false;
  [[maybe_unused]] const Status ended = EndFinish();
  serving_.store(false, std::memory_order_release);
  return true;
}

bool Plan::step_begun() const {
  for (size_t i = 0; i < tensor_count(); ++i)
    if (ready_[i].load(std::memory_order_acquire) != 0) return true;
  return false;
}

bool Plan::exchanging() const {
  const size_t n = plan_.buckets.size();
  if (n == 0) return false;
  const uint64_t done = exchanged_.load(std::memory_order_relaxed);
  return published_[done % n].load(std::memory_order_acquire) > done / n;
}

std::string Plan::DescribeExchange() const {
  const uint64_t done = exchanged_.load(std::memory_order_relaxed);
  const size_t b = done % plan_.buckets.size();
  return StrCat("plan '", options_.name, "', step ", done / plan_.buckets.size() + 1, ", bucket ",
                b, " of ", plan_.buckets.size(), " (first tensor '",
                options_.tensors[plan_.buckets[b].first_tensor].name, "')");
}

}  // namespace bagua
