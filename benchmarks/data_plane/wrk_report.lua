-- SPDX-License-Identifier: Apache-2.0
-- Writes the results of wrk as one line of JSON.
function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format('\n{"requests": %d, "microseconds": %d, "bytes": %d, "p50": %d, "p99": %d, "errors": %d}\n',
    summary.requests, summary.duration, summary.bytes, latency:percentile(50), latency:percentile(99),
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
