//! The budgets of a check: steps, and parts of objects and arrays that may be recorded as evaluated.

use super::super::json::Location;
use super::{Check, Stop};

/// The number of bytes that are compared or copied in one step.
const BYTES_PER_STEP: usize = 32;

/// The maximum number of parts that are reserved at the same time: their records take about 80 MB.
const HELD_PARTS_MAX: u64 = 8 << 20;

/// The interval of checks for cancellation: this many steps take a few milliseconds.
const STEPS_PER_CANCELLATION_CHECK: u64 = 1 << 14;

impl<'s> Check<'s, '_, '_> {
    /// Takes steps from the budget, and checks for cancellation at intervals.
    pub(crate) fn count(&mut self, steps: u64) -> Result<(), Stop<'s>> {
        self.steps = self.steps.checked_sub(steps).ok_or(Stop::TooManySteps)?;
        if self.steps_at_cancellation_check - self.steps >= STEPS_PER_CANCELLATION_CHECK {
            self.steps_at_cancellation_check = self.steps;
            if (self.is_cancelled)() {
                return Err(Stop::TooManySteps);
            }
        }
        Ok(())
    }

    /// Reserves the maximum that can be recorded about an object or an array, until it is [released](Self::release).
    pub(super) fn hold(&mut self, at: Location) -> Result<(), Stop<'s>> {
        self.held += self.json.parts_of(at);
        match self.held > HELD_PARTS_MAX {
            true => Err(Stop::TooManySteps),
            false => Ok(()),
        }
    }

    pub(super) fn release(&mut self, at: Location) {
        self.held -= self.json.parts_of(at);
    }

    /// Takes the steps for comparing or copying this many bytes.
    pub(crate) fn count_bytes(&mut self, bytes: usize) -> Result<(), Stop<'s>> {
        self.count(1 + (bytes / BYTES_PER_STEP) as u64)
    }
}
