-- Rouse's own locks; see rouse.lock.

-- Takes the lock for this name, waits for it if necessary, and holds it until the end of the transaction.
-- Names may share a lock. Served by the primary key.
CREATE OR REPLACE FUNCTION rouse._lock(p_purpose text, p_name text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM rouse.lock AS l WHERE l.purpose = p_purpose AND l.slot = (hashtextextended(p_name, 0) & 1023)::integer FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'rouse: no lock for %', p_purpose USING ERRCODE = 'internal_error';
    END IF;
END
$$;

-- Takes the lock for this name in the same way, unless another transaction has it: then it returns false at once.
CREATE OR REPLACE FUNCTION rouse._try_lock(p_purpose text, p_name text) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM rouse.lock AS l WHERE l.purpose = p_purpose AND l.slot = (hashtextextended(p_name, 0) & 1023)::integer FOR UPDATE SKIP LOCKED;
    RETURN FOUND;
END
$$;
