#include "common/device/cpu.h"
#include "common/device/device.h"

namespace bagua {
namespace {

struct DeviceEntry {
  bool (*serves)(int index);
  const Device* (*get)();
};

constexpr DeviceEntry kDevices[] = {{[](int index) { return index == kCpu; }, CpuDevice}};

}  // namespace

Result<const Device*> FindDevice(int index) {
  for (const DeviceEntry& entry : kDevices)
    if (entry.serves(index)) return entry.get();
  return Status(StatusCode::kInvalidArgument,
                StrCat("the tensor is on GPU ", index,
                       ", which this build cannot reach. Move it to the CPU first."));
}

}  // namespace bagua
