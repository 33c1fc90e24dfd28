// One operation that a user started on this rank, from its enqueueing to its end.
#ifndef BAGUA_COMMON_RUNTIME_OPERATION_H_
#define BAGUA_COMMON_RUNTIME_OPERATION_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/status.h"
#include "common/device/device.h"
#include "common/runtime/request.h"

namespace bagua {

class Plan;

// A result whose shape the ranks decide together. `owned` is empty when the user gave the memory.
struct OperationResult {
  Shape shape;
  std::byte* data = nullptr;
  DeviceMemory owned;
};

class Operation;

// Hears of an operation's end just before its user does.
class OperationObserver {
 public:
  virtual ~OperationObserver() = default;
  virtual void OnEnd(const Operation& operation, const Status& status) = 0;
};

// Thread-safety: written by the enqueueing thread before it is queued, then by the thread that
// drives the loop until End; read by anyone once ended().
class Operation {
 public:
  // Gives memory for result `index`; null function: the core allocates.
  using AllocateFunction = void* (*)(void* context, int32_t index, int32_t ndim,
                                     const int64_t* shape);
  using DoneFunction = void (*)(void* context, int status, const char* message);

  Request request;
  std::string name;       // "": unnamed
  uint64_t sequence = 0;  // unnamed: which one of its group, from 1; else 0
  std::vector<const std::byte*> inputs;
  std::vector<std::byte*> outputs;  // allreduce, broadcast
  AllocateFunction allocate = nullptr;
  DoneFunction done = nullptr;
  void* context = nullptr;
  int64_t* received_splits_out = nullptr;  // alltoall: a copy for the user; may be null
  std::shared_ptr<Plan> plan;              // kRegisterPlan
  std::vector<int> ranks;                  // kAddGroup: ascending
  uint32_t removes = 0;                    // kRemoveGroup
  Deadline since;                          // when it was enqueued
  OperationObserver* observer = nullptr;

  // Filled before the end.
  std::vector<OperationResult> results;
  std::vector<int64_t> received_splits;
  uint32_t added = 0;  // kAddGroup: the group's number

  bool ended() const { return ended_.load(std::memory_order_acquire); }
  // Only once ended().
  const Status& status() const { return status_; }
  // Exactly once, when no memory of the operation is touched any more. Runs `done`.
  void End(Status status) {
    BAGUA_CHECK(!ended()) << DescribeOperation(request.kind, name, sequence) << " ended twice";
    status_ = std::move(status);
    if (observer != nullptr) observer->OnEnd(*this, status_);
    if (received_splits_out != nullptr)
      std::copy(received_splits.begin(), received_splits.end(), received_splits_out);
    // The user may free everything as soon as the flag is seen: `done` comes first.
    if (done != nullptr) done(context, static_cast<int>(status_.code()), status_.message().c_str());
    ended_.store(true, std::memory_order_release);
  }
  std::string Describe() const { return DescribeOperation(request.kind, name, sequence); }

 private:
  Status status_;
  std::atomic<bool> ended_{false};
};

using OperationPtr = std::shared_ptr<Operation>;

}  // namespace bagua

#endif  // BAGUA_COMMON_RUNTIME_OPERATION_H_
