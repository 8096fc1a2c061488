# SPDX-License-Identifier: Apache-2.0
"""Patterns of HAProxy's sample expressions, log-formats and conditions (manual, 7 and 8.2.6).

Invariant: pure. No fetch or converter that matches opens a file, reads the environment or starts a program. Words are
separated by line ends, which no word contains.
"""

from __future__ import annotations

# HAProxy reads an ACL value with a leading dash as a flag, and the flag `-f` opens a file. So `_PATTERN` accepts no
# leading dash; after `--`, any WORD is safe.
WORD = r"[^\n]+"
_PATTERN = r"[^\n-][^\n]*"
IDENTIFIER = r"[A-Za-z0-9][A-Za-z0-9_.:-]*"

# HAProxy interprets quotes, backslashes, commas and parentheses, so they are accepted within double quotes only.
_ARGUMENT = r"""(?:"(?:[^"\\\n]|\\[^\n])*"|[^\n"'(),\\]*)"""
_ARGUMENTS = rf"(?:\({_ARGUMENT}(?:,{_ARGUMENT})*\))?"
_FETCH = (
    r"(?:src|dst|src_port|dst_port|(?:fc|bc|fe|be|so|srv|ssl|http_auth)_[a-z0-9_]+|(?:req|res|capture|txn)\.[a-z0-9_.]+"
    r"|(?:path|url|base|query|hdr|cook|method|pathq|urlp)(?:_[a-z0-9]+)?|status|unique-id|date|date_us|rand|uuid|nbsrv"
    r"|connslots|queue|avg_queue|var|str|int|bool|always_true|always_false)"
)
_CONVERTER = (
    r"(?:lower|upper|hex|hex2i|base64|b64dec|ub64enc|ub64dec|url_enc|url_dec|json|sha1|sha2|md5|digest|crc32c?|crc32"
    r"|xxh32|xxh64|xxh3|djb2|sdbm|wt6|length|bytes|field|word|regsub|concat|strcmp|iif|ltime|ms_ltime|us_ltime|utime"
    r"|ms_utime|us_utime|http_date|host_only|port_only|ipmask|language|add|sub|mul|div|mod|neg|even|odd|not|bool|and"
    r"|or|xor|cpl)"
)
EXPRESSION = rf"{_FETCH}{_ARGUMENTS}(?:,{_CONVERTER}{_ARGUMENTS})*"

_FLAGS = r"(?:\{[-+A-Z,]*\})?"
LOG_FORMAT = rf"(?:[^%\n]|%%|%{_FLAGS}(?:[A-Za-z0-9]+|\[{EXPRESSION}\]))+"

MATCH = (
    rf"{EXPRESSION}(?: -i)?(?: -m (?:str|beg|end|sub|dir|dom|reg|len|int|bool|found))?"
    rf"(?: --(?: {WORD})+|(?: {_PATTERN})*)"
)
# HAProxy ends an ACL in braces at the first closing brace, so no value may be a closing brace.
_INLINE = (
    rf"{EXPRESSION}(?: -i)?(?: -m (?:str|beg|end|sub|dir|dom|reg|len|int|bool|found))?"
    r"(?: --)?(?: (?!\}\n|\}$)[^\n-][^\n]*)*"
)
_TERM = rf"(?:!?{IDENTIFIER}|\|\||!?\{{ {_INLINE} \}}|! \{{ {_INLINE} \}})"
CONDITION = rf"(?: (?:if|unless)(?: {_TERM})+)"
