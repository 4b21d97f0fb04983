-- About how many locks all sessions of the server can hold together. One row; reads settings.
SELECT current_setting('max_locks_per_transaction')::int8
       * (current_setting('max_connections')::int8 + current_setting('max_prepared_transactions')::int8)
