-- Rouse's own locks; see rouse.lock.

-- Takes the lock for this name, waiting for it if necessary, and holds it until the end of the transaction. Names may
-- share a lock. Served by the primary key.
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

-- Refuses a transaction that keeps one snapshot. It would wait for a lock, and then count rows as they were before the
-- previous holders of the lock changed them: a lock row that was only locked raises no serialization failure.
CREATE OR REPLACE FUNCTION rouse._require_read_committed(p_what text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'rouse: % needs a transaction with isolation level READ COMMITTED, not %', p_what, upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'invalid_transaction_state',
                  HINT = 'If a pooler refuses the setting that hosts send: ALTER ROLE … SET default_transaction_isolation = ''read committed''.';
    END IF;
END
$$;
