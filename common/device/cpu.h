// The CPU as a device.
#ifndef BAGUA_COMMON_DEVICE_CPU_H_
#define BAGUA_COMMON_DEVICE_CPU_H_

#include "common/device/device.h"

namespace bagua {

const Device* CpuDevice();

}  // namespace bagua

#endif  // BAGUA_COMMON_DEVICE_CPU_H_
