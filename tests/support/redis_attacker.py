"""What the holder of one job's Redis URL tries: the file imports nothing of ours, so that a pod can run it as text."""

from typing import Any

import redis

READ = "return redis.call('GET', KEYS[1])"
SNEAK = "return redis.call('GET', ARGV[1])"
SCAN = "return redis.call('KEYS', '*')"
UNKILLABLE = "redis.call('SET', KEYS[1], 1) while true do end"


def attacks(victim: str, own: str) -> dict[str, tuple[Any, ...]]:
    """Returns commands by their purpose. `victim` and `own` are prefixes of keys."""
    return {
        "read its state": ("GET", f"{victim}state"),
        "read its data index": ("HGETALL", f"{victim}blocks"),
        "take its place": ("INCR", f"{victim}term"),
        "overwrite its state": ("SET", f"{victim}state", "{}"),
        "delete its state": ("DEL", f"{victim}state"),
        "let it expire": ("EXPIRE", f"{victim}state", "1"),
        "see whether it is there": ("EXISTS", f"{victim}state"),
        "rename its state": ("RENAME", f"{victim}state", f"{own}state"),
        "copy its state": ("COPY", f"{victim}state", f"{own}copy"),
        "read it in a script": ("EVAL", READ, "1", f"{victim}state"),
        "read it in a script that hides the key": ("EVAL", SNEAK, "0", f"{victim}state"),
        "list keys": ("KEYS", "*"),
        "walk over keys": ("SCAN", "0"),
        "list keys in a script": ("EVAL", SCAN, "0"),
        "guess a key": ("RANDOMKEY",),
        "count keys": ("DBSIZE",),
        "empty the database": ("FLUSHDB",),
        "empty all": ("FLUSHALL",),
        "swap databases": ("SWAPDB", "0", "1"),
        "read the settings": ("CONFIG", "GET", "*"),
        "change a setting": ("CONFIG", "SET", "maxmemory", "1"),
        "list users": ("ACL", "LIST"),
        "make a user": ("ACL", "SETUSER", "me", "on", "nopass", "~*", "+@all"),
        "watch all commands": ("MONITOR",),
        "see who is there": ("CLIENT", "LIST"),
        "throw out others": ("CLIENT", "KILL", "TYPE", "normal"),
        "hold up everybody": ("CLIENT", "PAUSE", "60000"),
        "hold up everybody by waiting": ("DEBUG", "SLEEP", "60"),
        "stop the server": ("SHUTDOWN", "NOSAVE"),
        "become a replica": ("REPLICAOF", "127.0.0.1", "1"),
        "read the whole as a replica": ("SYNC",),
        "hear messages": ("SUBSCRIBE", "x"),
        "send messages": ("PUBLISH", "x", "y"),
        "leave a script for others": ("SCRIPT", "FLUSH"),
        "hold up everybody with a script that cannot be killed": ("EVAL", UNKILLABLE, "1", f"{own}state"),
        "store a script, which no job is charged for": ("SCRIPT", "LOAD", "return 1"),
        "call a stored script": ("EVALSHA", "0" * 40, "1", f"{own}state"),
        "fill the memory with one byte": ("SETRANGE", f"{own}state", str((512 << 20) - 1), "x"),
        "fill the memory with one bit": ("SETBIT", f"{own}state", str((4 << 30) - 1), "1"),
        "fill the memory with an answer": ("HRANDFIELD", f"{own}blocks", "-12000", "WITHVALUES"),
        "grow a value bit by bit": ("APPEND", f"{own}state", "x"),
        "learn of the server": ("INFO",),
        "read the slow log": ("SLOWLOG", "GET"),
    }


def outcomes(url: str, victim_uid: str, own_uid: str) -> dict[str, str]:
    """Returns how each attempt ends: the answer, or the type and text of the error."""
    said = {}
    for name, command in attacks(f"emberscale:{victim_uid}:", f"emberscale:{own_uid}:").items():
        client: Any = redis.Redis.from_url(url, socket_timeout=5)
        try:
            said[name] = f"answered: {client.execute_command(*command)!r}"
        except redis.RedisError as error:
            said[name] = f"{type(error).__name__}: {error}"
        finally:
            client.close()
    return said


def refused(outcome: str) -> bool:
    """Whether Redis refused an attempt for lack of rights, not because of another error."""
    limits = (
        "NoPermissionError",
        "can't run this command",
        "can't access at least one of the keys",
        "ACL failure",
        "DEBUG command not allowed",
    )
    return not outcome.startswith("answered") and any(limit in outcome for limit in limits)
