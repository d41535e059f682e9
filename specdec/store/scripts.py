"""The Lua scripts of the Redis store: each is atomic, takes the time from Redis, and leaves no key without expiry.

The keys of one script carry one hash tag. The keys of a request's tokens are derived from its head's
(`:tokens:CHOICE`), so the caller need not know them; they are in the same slot. Times are in milliseconds.

A Redis that is out of memory refuses a script's first write if that may need memory, and no later one. So scripts that
store write first and clean up afterwards. END, which frees memory, does not.
"""

from __future__ import annotations

import hashlib


class Script:
    """A Lua script, and the digest under which a Redis that has run it keeps it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function whole(number) return string.format('%.0f', number) end
"""

# KEYS: expiries, records, version.
# ARGV: member, record, ttl, max replicas, whether more than the load changed (1 or 0).
ANNOUNCE = Script(
    _NOW
    + """
local function drop(members)
  for _, member in ipairs(members) do
    redis.call('ZREM', KEYS[1], member)
    redis.call('HDEL', KEYS[2], member)
  end
end
local is_new = redis.call('ZADD', KEYS[1], whole(now + ARGV[3]), ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
if is_new == 1 or ARGV[5] == '1' then
  redis.call('DEL', KEYS[3])  -- whatever it is
  redis.call('HSET', KEYS[3], 'stamp', time[1] .. '.' .. time[2] .. ' ' .. ARGV[1])
end
drop(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', whole(now)))
local surplus = redis.call('ZCARD', KEYS[1]) - ARGV[4]
if surplus > 0 then drop(redis.call('ZRANGE', KEYS[1], 0, surplus - 1)) end
-- Redis may have evicted the expiries and kept the records: those of no known expiry would stay for ever.
if redis.call('HLEN', KEYS[2]) > redis.call('ZCARD', KEYS[1]) then
  for _, member in ipairs(redis.call('HKEYS', KEYS[2])) do
    if not redis.call('ZSCORE', KEYS[1], member) then redis.call('HDEL', KEYS[2], member) end
  end
end
local ttl = whole(math.max(ARGV[3], redis.call('PTTL', KEYS[1])))
redis.call('PEXPIRE', KEYS[1], ttl)
redis.call('PEXPIRE', KEYS[2], ttl)
redis.call('PEXPIRE', KEYS[3], ttl)
"""
)

# KEYS: expiries, records. ARGV: member.
WITHDRAW = Script(
    """
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
"""
)

# KEYS: expiries, records, version. ARGV: a known version.
# Returns the version, then the records unless it is the known one.
REGISTERED = Script(
    _NOW
    + """
local stamp = redis.pcall('HGET', KEYS[3], 'stamp')
if type(stamp) ~= 'string' then stamp = '' end
local version = redis.call('ZCOUNT', KEYS[1], '(' .. whole(now), '+inf') .. ' ' .. stamp
local records = {version}
if version == ARGV[1] then return records end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. whole(now), '+inf')) do
  local record = redis.call('HGET', KEYS[2], member)
  if record then records[#records + 1] = record end
end
return records
"""
)

# KEYS: holders. ARGV: replica, ttl, max holders.
ADD_PREFIX = Script(
    _NOW
    + """
redis.call('ZADD', KEYS[1], whole(now + ARGV[2]), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', whole(now))
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -ARGV[3] - 1)
redis.call('PEXPIRE', KEYS[1], whole(math.max(ARGV[2], redis.call('PTTL', KEYS[1]))))
"""
)

# KEYS: holders. Returns the replicas.
PREFIX_HOLDERS = Script(_NOW + "return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. whole(now), '+inf')")

# A stored number may be anything: a loop of that length would block all users of the Redis.
_CHOICES = """
local function choices(stored)
  local number = tonumber(stored)
  if not number or number ~= number or number < 0 or number > 1024 then error('num_choices is out of range') end
  return number
end
"""

_RECORD = (
    _CHOICES
    + """
local function read_record()
  local head = redis.call('HMGET', KEYS[1], 'owner', 'generation', 'seed', 'params', 'num_choices', 'ended', 'aborted')
  if not head[1] then return false end
  local tokens = {}
  for choice = 0, choices(head[5]) - 1 do
    tokens[#tokens + 1] = redis.call('GET', KEYS[1] .. ':tokens:' .. choice) or ''
  end
  return {head[1], head[2], head[3], head[4], head[6], tokens, head[7]}
end
"""
)

_EXPIRE = (
    _CHOICES
    + """
local function expire(ttl)
  for choice = 0, choices(redis.call('HGET', KEYS[1], 'num_choices')) - 1 do
    redis.call('PEXPIRE', KEYS[1] .. ':tokens:' .. choice, ttl)
  end
  redis.call('PEXPIRE', KEYS[1], ttl)
end
local function hold(lease, keep, member)
  redis.call('HSET', KEYS[1], 'lease_until', whole(now + lease))
  -- A tenth more than needed: most appends then need not renew the expiry of every choice.
  if redis.call('PTTL', KEYS[1]) < lease + keep then expire(whole(lease + keep * 1.1)) end
  redis.call('ZADD', KEYS[2], whole(now + lease), member)
  if redis.call('PTTL', KEYS[2]) < lease then redis.call('PEXPIRE', KEYS[2], whole(lease * 2)) end
end
"""
)

# KEYS: head, live.
# ARGV: member, owner, seed, params, choices, lease, keep, max concurrent (-1: any), take over, restart (1 or 0).
# Returns {'held', owner}, {'many', count} or {'begun', generation, record or false}.
BEGIN = Script(
    _NOW
    + _RECORD
    + _EXPIRE
    + """
local old = redis.call('HMGET', KEYS[1], 'owner', 'generation', 'lease_until', 'ended', 'num_choices')
local restart = ARGV[10] == '1'
if old[1] and old[4] == '1' and not restart then return {'begun', old[2], read_record()} end
-- A lease that ends later than any that begins now is of a clock that was set back since. It ends in time, but not at
-- once: its owner may be alive.
local lease_until, beyond = whole(now + ARGV[6]), now + 2 * ARGV[6]
if old[1] and old[1] ~= ARGV[2] and tonumber(old[3]) > now and ARGV[9] == '0' then
  if tonumber(old[3]) > beyond then redis.pcall('HSET', KEYS[1], 'lease_until', lease_until) end
  return {'held', old[1]}
end
local others = redis.call('ZCOUNT', KEYS[2], '(' .. whole(now), '+inf')
if tonumber(redis.call('ZSCORE', KEYS[2], ARGV[1]) or 0) > now then others = others - 1 end
if tonumber(ARGV[8]) >= 0 and others >= tonumber(ARGV[8]) then
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. whole(beyond), '+inf')) do
    redis.pcall('ZADD', KEYS[2], lease_until, member)
  end
  return {'many', others}
end
local record = not restart and read_record()
local generation = whole(math.max((old[2] or 0) + 1, now))
redis.call('HSET', KEYS[1], 'owner', ARGV[2], 'generation', generation, 'aborted', '0')
if not record then
  redis.call('HSET', KEYS[1], 'seed', ARGV[3], 'params', ARGV[4], 'num_choices', ARGV[5], 'ended', '0')
  for choice = 0, math.max(ARGV[5], choices(old[5] or 0)) - 1 do redis.call('DEL', KEYS[1] .. ':tokens:' .. choice) end
end
redis.call('HSET', KEYS[1], 'lease', ARGV[6])
hold(tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', whole(now))
return {'begun', generation, record}
"""
)

_OWNED = """
local head = redis.call('HMGET', KEYS[1], 'owner', 'generation', 'ended', 'num_choices', 'lease', 'aborted')
if head[1] ~= ARGV[2] or head[2] ~= ARGV[3] or head[3] == '1' then return 0 end
"""

_WRITABLE = (
    _OWNED
    + """
if head[6] == '1' then return 0 end
"""
)

# KEYS: head, live. ARGV: member, owner, generation, keep, choice, first byte, bytes. Returns an Appended.
APPEND = Script(
    _NOW
    + _EXPIRE
    + _WRITABLE
    + """
if tonumber(ARGV[5]) >= tonumber(head[4]) then return 0 end
local key = KEYS[1] .. ':tokens:' .. ARGV[5]
local length = redis.call('STRLEN', key)
local fits = length >= tonumber(ARGV[6])
if fits and #ARGV[7] > 0 then redis.call('SETRANGE', key, ARGV[6], ARGV[7]) end
hold(tonumber(head[5]), tonumber(ARGV[4]), ARGV[1])
-- A new one.
if length == 0 then redis.call('PEXPIRE', key, redis.call('PTTL', KEYS[1])) end
return fits and 1 or 2
"""
)

# KEYS: head, live. ARGV: member, owner, generation, keep. Returns whether the owner still has the request.
RENEW = Script(
    _NOW
    + _EXPIRE
    + _WRITABLE
    + """
hold(tonumber(head[5]), tonumber(ARGV[4]), ARGV[1])
return 1
"""
)

# KEYS: head, live. ARGV: member, owner, generation, keep. Returns whether the owner had the request.
END = Script(
    _NOW
    + _EXPIRE
    + _OWNED
    + """
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HSET', KEYS[1], 'ended', '1', 'lease_until', '0')
expire(ARGV[4])
return 1
"""
)

# KEYS: head. Returns whether there is an owner with a live lease.
ABORT = Script(
    _NOW
    + """
local head = redis.call('HMGET', KEYS[1], 'owner', 'lease_until', 'ended')
if not head[1] or head[3] == '1' or tonumber(head[2]) <= now then return 0 end
redis.call('HSET', KEYS[1], 'aborted', '1')
return 1
"""
)

# KEYS: head. Returns the record or nil.
LOAD = Script(_RECORD + "return read_record()")

# KEYS: bucket. ARGV: amount, rate per second, burst, force (1 or 0). Returns seconds to wait, as a string.
TAKE = Script(
    _NOW
    + """
local amount, rate, burst = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local old = redis.call('HMGET', KEYS[1], 'level', 'at')
local level, at = tonumber(old[1] or 'none'), tonumber(old[2] or 'none')
-- A value that no bucket can have is dropped, as a bucket that Redis evicted.
if level and at and math.abs(level) < 2^53 and at == at then
  level = math.min(burst, level + math.max(0, now - at) * rate / 1000)
else
  level = burst
end
local wait = 0
local needed = math.min(amount, burst)
if ARGV[4] == '1' or level >= needed then
  level = math.min(burst, level - amount)
else
  wait = (needed - level) / rate
end
redis.call('HSET', KEYS[1], 'level', string.format('%.17g', level), 'at', whole(now))
-- A full bucket need not be remembered.
redis.call('PEXPIRE', KEYS[1], whole(math.min(math.ceil((burst - level) / rate * 1000) + 1000, 1e12)))
return string.format('%.17g', wait)
"""
)
