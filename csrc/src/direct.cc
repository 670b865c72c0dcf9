#include "zero/direct.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>

namespace zero {

int Direct::add(int arena, std::vector<Range> ranges, std::string label) {
  const std::lock_guard lock(mutex_);
  auto op = std::make_unique<Op>();
  op->arena = arena;
  op->ranges = std::move(ranges);
  op->label = std::move(label);
  ops_.push_back(std::move(op));
  return static_cast<int>(ops_.size()) - 1;
}

void Direct::find_overlaps(Op& op) {
  for (; op.known < ops_.size(); ++op.known) {
    const Op& other = *ops_[op.known];
    if (other.arena != op.arena) {
      continue;
    }
    const bool touches =
        std::any_of(op.ranges.begin(), op.ranges.end(), [&](const Range& a) {
          return std::any_of(
              other.ranges.begin(), other.ranges.end(), [&](const Range& b) {
                return a.first < b.second && b.first < a.second;
              });
        });
    if (touches) {
      op.overlaps.push_back(static_cast<int>(op.known));
    }
  }
}

Result<bool> Direct::start(int id, std::vector<Copy> copies, int64_t offset) {
  std::vector<Copy> dropped;
  const std::lock_guard lock(mutex_);
  Op& op = *ops_[static_cast<size_t>(id)];
  find_overlaps(op);
  Pending pending{
      .op = id,
      .number = 0,
      .offset = offset,
      .copies = std::move(copies),
      .after = {}};
  for (const int index : op.overlaps) {
    const Op& other = *ops_[static_cast<size_t>(index)];
    if (other.busy) {
      dropped = std::move(pending.copies);
      return Status::error(
          "the plan gives it memory that '" + other.label + "' still uses");
    }
    if (other.number >= 0) {
      pending.after.push_back(other.number);
    }
  }
  pending.number = peers_.begin();
  if (!busy_.empty() && *busy_.begin() <= pending.number - peers_.window()) {
    dropped = std::move(pending.copies);
    return Status::error(
        "too many transfers have begun since one that was not released");
  }
  if (pending.number >= peers_.window()) {
    pending.after.push_back(pending.number - peers_.window());
  }
  op.number = pending.number;
  op.busy = true;
  busy_.insert(op.number);
  pending_.push_back(std::move(pending));
  ZERO_RETURN_IF_ERROR(advance(dropped));
  return pending_.empty() || pending_.back().number != op.number;
}

Status Direct::advance(std::vector<Copy>& dropped) {
  for (auto it = pending_.begin(); it != pending_.end();) {
    auto& after = it->after;
    after.erase(
        std::remove_if(
            after.begin(), after.end(),
            [&](int64_t number) { return peers_.released(number); }),
        after.end());
    if (!after.empty()) {
      ++it;
      continue;
    }
    ZERO_RETURN_IF_ERROR(make(*it));
    std::move(
        it->copies.begin(), it->copies.end(), std::back_inserter(dropped));
    it = pending_.erase(it);
  }
  return {};
}

Status Direct::make(Pending& pending) {
  try {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const Copy& copy : pending.copies) {
      if (copy.from.is_contiguous() && copy.to.is_contiguous() &&
          copy.from.scalar_type() == copy.to.scalar_type()) {
        if (copy.from.nbytes() > 0) {
          std::memcpy(
              copy.to.mutable_data_ptr(), copy.from.const_data_ptr(),
              copy.from.nbytes());
        }
      } else {
        copy.to.copy_(copy.from);
      }
    }
  } catch (const c10::Error& error) {
    return Status::error(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return Status::error(error.what());
  }
  peers_.publish(pending.number, pending.offset);
  return {};
}

Status Direct::wait(int id) {
  int64_t number = -1;
  std::string label;
  while (true) {
    std::vector<Copy> dropped;
    int64_t first = -1;
    {
      const std::lock_guard lock(mutex_);
      const Op& op = *ops_[static_cast<size_t>(id)];
      number = op.number;
      label = "'" + op.label + "'";
      ZERO_RETURN_IF_ERROR(advance(dropped));
      if (!pending_.empty() && pending_.front().number <= number) {
        first = pending_.front().after.front();
        label = "the release of memory for '" +
            ops_[static_cast<size_t>(pending_.front().op)]->label + "'";
      }
    }
    if (first < 0) {
      break;
    }
    ZERO_RETURN_IF_ERROR(peers_.wait_released(first, label));
  }
  return peers_.wait_published(number, label);
}

void Direct::release(int id) {
  std::vector<Copy> dropped;
  const std::lock_guard lock(mutex_);
  Op& op = *ops_[static_cast<size_t>(id)];
  if (op.busy) {
    op.busy = false;
    busy_.erase(op.number);
    peers_.release(op.number);
  }
  (void)advance(dropped);
}

int64_t Direct::number(int id) const {
  const std::lock_guard lock(mutex_);
  return ops_[static_cast<size_t>(id)]->number;
}

void Direct::clear() {
  std::vector<Pending> dropped;
  const std::lock_guard lock(mutex_);
  dropped.swap(pending_);
}

}  // namespace zero
