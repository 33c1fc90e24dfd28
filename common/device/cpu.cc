#include "common/device/cpu.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace bagua {
namespace {

// A cache line: also enough for vector loads of every instruction set.
constexpr std::align_val_t kAlignment{64};

class Cpu final : public Device {
 public:
  const char* name() const override { return "cpu"; }

  Result<DeviceMemory> Allocate(size_t bytes) const override {
    void* const memory = ::operator new(std::max<size_t>(bytes, 1), kAlignment, std::nothrow);
    if (memory == nullptr)
      return Status(StatusCode::kInternal, StrCat("no memory for ", bytes, " bytes"));
    return DeviceMemory(static_cast<std::byte*>(memory),
                        [](std::byte* data) { ::operator delete(data, kAlignment); });
  }

  void Copy(void* dst, const void* src, size_t bytes) const override {
    if (bytes > 0) std::memcpy(dst, src, bytes);
  }

  void Clear(void* dst, size_t bytes) const override {
    if (bytes > 0) std::memset(dst, 0, bytes);
  }
};

}  // namespace

const Device* CpuDevice() {
  static const Cpu cpu;
  return &cpu;
}

}  // namespace bagua
