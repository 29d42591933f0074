// Early-return macros for absl::Status and absl::StatusOr.
#ifndef BASE_STATUS_MACROS_H_
#define BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define EXPERTD_CONCAT_INNER(a, b) a##b
#define EXPERTD_CONCAT(a, b) EXPERTD_CONCAT_INNER(a, b)

// Returns the status of `expr` from the enclosing function unless it is OK.
#define RETURN_IF_ERROR(expr)                        \
  do {                                               \
    absl::Status expertd_status = (expr);            \
    if (!expertd_status.ok()) return expertd_status; \
  } while (false)

// Assigns the value of a StatusOr to `lhs`, or returns its status.
#define ASSIGN_OR_RETURN(lhs, expr) \
  ASSIGN_OR_RETURN_IMPL(EXPERTD_CONCAT(expertd_value_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr)    \
  auto tmp = (expr);                             \
  if (!tmp.ok()) return std::move(tmp).status(); \
  lhs = *std::move(tmp)

#endif  // BASE_STATUS_MACROS_H_
