-- A lane is looked up through its index, whatever the statistics say: a session that made its plan
-- while the catalog had a page or two would go on reading all of it when it has 10,000 rows.
ALTER FUNCTION rouse.enqueue SET enable_seqscan = off;
ALTER FUNCTION rouse.enqueue_many SET enable_seqscan = off;
