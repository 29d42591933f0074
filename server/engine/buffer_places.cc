// Range arithmetic is in unsigned 64 bits and compares before it adds.
#include "server/engine/buffer_places.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/strings.h"

namespace expertd::engine {
namespace {

// Whether `bytes` of `dtype` fit at the place; sets place.memory when they do.
void CheckPlace(BufferPlace& place, DType dtype, int64_t bytes, Violations& violations) {
  const TensorInfo& info = place.tensor->info;
  if (dtype != info.dtype) {
    violations.Add(Reason::kDtypeUnsupported, place.path,
                   StrCat("got tensor ", ShownId(place.buffer_id), " of ", DTypeName(info.dtype),
                          ", need ", DTypeName(dtype)));
    return;
  }
  const auto size = static_cast<uint64_t>(info.bytes);
  const auto need = static_cast<uint64_t>(bytes);
  if (place.offset_bytes > size || need > size - place.offset_bytes) {
    violations.Add(
        Reason::kBufferRange, place.path,
        StrCat("got offset ", place.offset_bytes, " in tensor ", ShownId(place.buffer_id), " of ",
               size, " bytes, need ", need, " bytes from there"));
    return;
  }
  if (place.offset_bytes % DTypeSize(dtype) != 0) {
    violations.Add(Reason::kBufferRange, StrCat(place.path, ".offset_bytes"),
                   StrCat("got ", place.offset_bytes, ", need a multiple of ", DTypeSize(dtype),
                          ", the size of a ", DTypeName(dtype)));
    return;
  }
  place.memory = place.tensor->memory.as<char>() + place.offset_bytes;
}

void Pin(BufferPlace& place, const TensorStore& store, Violations& violations) {
  absl::StatusOr<TensorPtr> tensor = store.Find(place.buffer_id);
  if (tensor.ok()) {
    place.tensor = *std::move(tensor);
  } else {
    violations.Add(Reason::kBufferUnknown, place.path,
                   StrCat("got ", store.WhyUnknown(place.buffer_id)));
  }
}

int64_t BytesOf(const TensorOutput& output) {
  int64_t bytes = static_cast<int64_t>(DTypeSize(output.dtype));
  for (const int64_t size : output.shape) bytes *= size;
  return bytes;
}

// A checked place with its size.
struct Range {
  const BufferPlace* place;
  uint64_t begin;
  uint64_t end;
};

Range RangeOf(const BufferPlace& place, int64_t bytes) {
  return {&place, place.offset_bytes, place.offset_bytes + static_cast<uint64_t>(bytes)};
}

// REQUIRES: all places have been checked.
void CheckOverlaps(Operation& op, Violations& violations) {
  std::vector<Range> taken;
  for (const TensorInput* input : op.Inputs()) {
    if (input->buffer.present()) taken.push_back(RangeOf(input->buffer, input->bytes));
  }
  for (const TensorOutput* output : op.Outputs()) {
    if (!output->buffer.present()) continue;
    const Range range = RangeOf(output->buffer, BytesOf(*output));
    for (const Range& other : taken) {
      if (range.place->tensor != other.place->tensor) continue;
      if (std::max(range.begin, other.begin) >= std::min(range.end, other.end)) continue;
      violations.Add(Reason::kBufferRange, range.place->path,
                     StrCat("got bytes ", range.begin, " to ", range.end, " of tensor ",
                            ShownId(range.place->buffer_id), ", need none of ", other.begin, " to ",
                            other.end, ", which are ", other.place->path));
      break;
    }
    taken.push_back(range);
  }
}

}  // namespace

absl::Status PinPlaces(Operation& op, const TensorStore& store) {
  Violations violations;
  for (TensorInput* input : op.Inputs()) {
    if (!input->buffer.present()) continue;
    Pin(input->buffer, store, violations);
    if (input->buffer.tensor != nullptr) {
      CheckPlace(input->buffer, input->dtype, input->bytes, violations);
    }
  }
  for (TensorOutput* output : op.Outputs()) {
    if (output->buffer.present()) Pin(output->buffer, store, violations);
  }
  return violations.ToStatus(OpName(op.kind));
}

absl::Status CheckResultPlaces(Operation& op) {
  Violations violations;
  for (TensorOutput* output : op.Outputs()) {
    if (!output->buffer.present()) continue;
    if (!output->present()) {
      violations.Add(Reason::kConfigInvalid, output->buffer.path,
                     "got a buffer, need none: this step has no such result");
    } else {
      CheckPlace(output->buffer, output->dtype, BytesOf(*output), violations);
    }
  }
  if (violations.empty()) CheckOverlaps(op, violations);
  return violations.ToStatus(OpName(op.kind));
}

bool HasResultPlaces(Operation& op) {
  for (const TensorOutput* output : op.Outputs()) {
    if (output->buffer.present()) return true;
  }
  return false;
}

void TouchResultPlaces(Operation& op) {
  for (const TensorOutput* output : op.Outputs()) {
    if (output->buffer.present()) output->buffer.tensor->Touch();
  }
}

absl::Status WithTouchedPlaces(Operation& op, const absl::Status& status) {
  std::string names;
  for (const TensorOutput* output : op.Outputs()) {
    if (!output->buffer.present()) continue;
    StrAppend(&names, names.empty() ? "" : ", ", ShownId(output->buffer.buffer_id));
  }
  if (names.empty()) return status;
  return WithContext(status, StrCat("resident ", names, " may be overwritten in part"));
}

void ReleasePlaces(Operation& op) {
  for (TensorInput* input : op.Inputs()) {
    input->buffer.tensor.reset();
    input->buffer.memory = nullptr;
    input->fetched.clear();
    input->fetched.shrink_to_fit();
  }
  for (TensorOutput* output : op.Outputs()) {
    output->buffer.tensor.reset();
    output->buffer.memory = nullptr;
  }
}

}  // namespace expertd::engine
