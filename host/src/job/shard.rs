//! Shards of a queue: parts of its lanes, which workers lease.

use super::LaneId;

/// The shard of a lane in a queue with this many shards, as in `rouse._shard_of`. Ids of lanes are hashes, so the
/// shards get about the same number of lanes.
pub fn shard_of(lane: LaneId, shards: u32) -> u32 {
    let shard = lane.0.unsigned_abs() % u64::from(shards.max(1));
    u32::try_from(shard).expect("the remainder is less than the number of shards")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_are_divided_evenly() {
        let mut lanes = [0; 5];
        for id in -5_000..5_000_i64 {
            lanes[shard_of(LaneId(id * 7), 5) as usize] += 1;
        }
        assert!(lanes.iter().all(|lanes| (1_999..=2_001).contains(lanes)));
    }

    #[test]
    fn every_lane_has_a_shard() {
        let shards = [i64::MIN, -17, -16, -1, 0, 1, 16, 17, i64::MAX];
        let shards = shards.map(|lane| shard_of(LaneId(lane), 16));
        assert_eq!(shards, [0, 1, 0, 1, 0, 1, 0, 1, 15]);
    }
}
