-- Large payloads stand in rouse.payload: a job's claims and its settlement write its row anew, and its end moves the row to the history.
-- With the payload in it, they would write the payload each time. Small ones stay in the row, where a claim reads them at once.

-- When a payload of so many bytes that is enqueued now is written to rouse.payload; null: it stays in the row, because it is small, or
-- because today's partition is missing: no worker has run for a week. The bound was measured (docs/decisions/payloads-are-written-once.md).
CREATE OR REPLACE FUNCTION rouse._payload_at(p_bytes integer, p_at timestamptz) RETURNS timestamptz
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF p_bytes IS NULL OR p_bytes < 2048 OR to_regclass('rouse.payload_' || to_char(p_at AT TIME ZONE 'UTC', 'YYYYMMDD')) IS NULL THEN
        RETURN NULL;
    END IF;
    RETURN p_at;
END
$$;

-- The payload of a job, of whose row these are the columns. Null where its partition is gone. Served by payload_job, in the partition of
-- its day and those of later days.
CREATE OR REPLACE FUNCTION rouse._payload(p_job bigint, p_payload jsonb, p_payload_at timestamptz) RETURNS jsonb
LANGUAGE plpgsql STABLE SET enable_seqscan = off AS $$
BEGIN
    IF p_payload_at IS NULL THEN
        RETURN p_payload;
    END IF;
    RETURN (SELECT p.payload::jsonb FROM rouse.payload AS p WHERE p.job = p_job AND p.kept_at >= p_payload_at LIMIT 1);
END
$$;
