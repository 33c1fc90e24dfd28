// Where tensors live: memory and copies of one kind of device. The CPU is always there; others are
// rows of the registry.
#ifndef BAGUA_COMMON_DEVICE_DEVICE_H_
#define BAGUA_COMMON_DEVICE_DEVICE_H_

#include <cstddef>
#include <functional>
#include <memory>

#include "common/base/status.h"

namespace bagua {

// Number of the CPU among devices; GPUs count from 0.
inline constexpr int kCpu = -1;

using DeviceMemory = std::unique_ptr<std::byte, std::function<void(std::byte*)>>;

// Stateless. Thread-safety: any thread.
class Device {
 public:
  virtual ~Device() = default;
  virtual const char* name() const = 0;
  // Uninitialised memory of at least `bytes`, aligned for every element type and never null;
  // kInternal if there is not enough.
  virtual Result<DeviceMemory> Allocate(size_t bytes) const = 0;
  // Both on this device, not overlapping; done when it returns. `bytes` 0 allows null pointers.
  virtual void Copy(void* dst, const void* src, size_t bytes) const = 0;
  // Writes zeros; done when it returns.
  virtual void Clear(void* dst, size_t bytes) const = 0;
};

// The device of tensors numbered `index`. kInvalidArgument naming what is missing.
Result<const Device*> FindDevice(int index);

}  // namespace bagua

#endif  // BAGUA_COMMON_DEVICE_DEVICE_H_
