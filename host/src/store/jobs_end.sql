-- The last of the $2 newest jobs below an id ($1; null: all), and when it was requested; no row where there are not so many. Reads as many
-- ids as jobs.sql reads jobs, in the same order.
SELECT kept.id, to_char(kept.requested_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')
FROM (
    SELECT j.id, j.requested_at FROM rouse.job AS j
    UNION ALL
    SELECT f.id, f.requested_at FROM rouse.finished AS f) AS kept
WHERE kept.id < coalesce($1, 9223372036854775807)
ORDER BY kept.id DESC OFFSET $2 - 1 LIMIT 1
