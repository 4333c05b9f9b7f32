#!/usr/bin/env python3
"""Generates docs/internals/protocol-vectors.json: an implementation of the protocol that shares no code with Seikan.

python3 scripts/protocol_vectors.py > docs/internals/protocol-vectors.json     (--check: compare instead)

Needs `pip install cryptography`. Section numbers are those of docs/internals/protocol*.md. Order:
primitives, handshake, cookies, capabilities, records and frames, slices, packing, paths, health, the vectors.
"""

import hashlib
import hmac
import json
import pathlib
import struct
import sys
from ipaddress import ip_address

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROLOGUE = b"Seikan v1 native tunnel handshake"
AES, CHACHA = 1, 2
NAMES = {AES: "AES-256-GCM", CHACHA: "ChaCha20-Poly1305"}


def u16(n):
    return struct.pack("<H", n)


def u24(n):
    return struct.pack("<I", n)[:3]


def u32(n):
    return struct.pack("<I", n)


# --- Section 2: primitives ---------------------------------------------------------------------


def blake(data):
    return hashlib.blake2s(data).digest()


def hkdf(ck, ikm, n):
    temp = hmac.new(ck, ikm, hashlib.blake2s).digest()
    outputs, last = [], b""
    for i in range(1, n + 1):
        last = hmac.new(temp, last + bytes([i]), hashlib.blake2s).digest()
        outputs.append(last)
    return outputs


def mac(key, data):
    return hashlib.blake2s(data, key=key, digest_size=16).digest()


def public(private):
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def dh(private, peer):
    return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(peer))


def nonce12(n):
    return bytes(4) + struct.pack("<Q", n)


def hchacha20(key, nonce):
    def rotate(x, n):
        return (x << n | x >> (32 - n)) & 0xFFFFFFFF

    def quarter(a, b, c, d):
        for x, y, z, n in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            s[x] = (s[x] + s[y]) & 0xFFFFFFFF
            s[z] = rotate(s[z] ^ s[x], n)

    s = list(struct.unpack("<12I", b"expand 32-byte k" + key) + struct.unpack("<4I", nonce))
    for _ in range(10):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return struct.pack("<8I", *s[:4], *s[12:])


def xaead(key, nonce, ad, plaintext):
    return ChaCha20Poly1305(hchacha20(key, nonce[:16])).encrypt(bytes(4) + nonce[16:], plaintext, ad)


# --- Section 4: handshake ----------------------------------------------------------------------


class Noise:
    """Both ends at once of Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s."""

    def __init__(self, prologue, s_i, e_i, s_r, e_r, psk, s_r_public=None):
        self.s_i, self.e_i, self.s_r, self.e_r, self.psk = s_i, e_i, s_r, e_r, psk
        self.h = self.ck = blake(b"Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s")
        self.mix_hash(prologue)
        self.mix_hash(s_r_public or public(s_r))

    def mix_hash(self, data):
        self.h = blake(self.h + data)

    def seal(self, key, plaintext):
        sealed = ChaCha20Poly1305(key).encrypt(nonce12(0), plaintext, self.h)
        self.mix_hash(sealed)
        return sealed

    def ephemeral(self, private):
        self.mix_hash(public(private))
        (self.ck,) = hkdf(self.ck, public(private), 1)
        return public(private)

    def initiation(self, payload):
        e = self.ephemeral(self.e_i)
        self.ck, key = hkdf(self.ck, dh(self.e_i, public(self.s_r)), 2)
        static = self.seal(key, public(self.s_i))
        self.ck, key = hkdf(self.ck, dh(self.s_i, public(self.s_r)), 2)
        return e + static + self.seal(key, payload)

    def response(self, payload):
        e = self.ephemeral(self.e_r)
        (self.ck,) = hkdf(self.ck, dh(self.e_r, public(self.e_i)), 1)
        (self.ck,) = hkdf(self.ck, dh(self.e_r, public(self.s_i)), 1)
        self.ck, t, key = hkdf(self.ck, self.psk, 3)
        self.mix_hash(t)
        return e + self.seal(key, payload)

    def keys(self):
        return hkdf(self.ck, b"", 2)


def tai64n(seconds, nanos):
    return struct.pack(">QI", 2**62 + 10 + seconds, nanos - nanos % 2**24)


def with_macs(message, receiver, cookie=None):
    message += mac(blake(b"skn-mac1" + receiver), message)
    return message + (mac(cookie, message) if cookie else bytes(16))


def initiation_message(noise, index, stamp, payload, cookie=None):
    head = bytes([0x11, 0, 0, 0]) + u32(index)
    return with_macs(head + noise.initiation(stamp + payload), public(noise.s_r), cookie)


def response_message(noise, index, receiver, payload):
    head = bytes([0x12, 0, 0, 0]) + u32(index) + u32(receiver)
    return with_macs(head + noise.response(payload), public(noise.s_i))


# --- Section 6: cookies ------------------------------------------------------------------------


def cookie_of(secret, address, port):
    return mac(secret, ip_address(address).packed + struct.pack(">H", port))


def cookie_reply(message, replier, nonce, cookie):
    key = blake(b"skn-cook" + replier)
    return bytes([0x13, 0, 0, 0]) + message[4:8] + nonce + xaead(key, nonce, message[-32:-16], cookie)


# --- Section 5: capabilities -------------------------------------------------------------------


def tlv(kind, value):
    return u16(kind) + u16(len(value)) + value


def capabilities(ciphers, mtu=1420, lanes=1, features=1, version=1, ethernet=False):
    return (
        tlv(0x8001, bytes([version]))
        + tlv(0x8002, bytes(ciphers))
        + tlv(3, bytes([lanes]))
        + tlv(4, u16(mtu))
        + tlv(5, struct.pack("<Q", features))
        + (tlv(0x8006, b"\1") if ethernet else b"")
    )


class Refused(Exception):
    pass


def parse_capabilities(payload):
    out = {"version": None, "ciphers": None, "max_lanes": 1, "inner_mtu": 1420, "features": 0, "mode": "ip"}
    if len(payload) > 256:
        raise Refused
    previous = -1
    while payload:
        if len(payload) < 4:
            raise Refused
        kind, length = struct.unpack_from("<HH", payload)
        value, payload = payload[4 : 4 + length], payload[4 + length :]
        number = kind & 0x7FFF
        if len(value) < length or number <= previous:
            raise Refused
        previous = number
        n = int.from_bytes(value, "little")
        if number == 1 and length == 1 and n >= 1:
            out["version"] = n
        elif number == 2:
            known = [c for c in value if c in NAMES]
            if len(set(known)) < len(known):
                raise Refused
            out["ciphers"] = known
        elif number == 3 and length == 1 and n >= 1:
            out["max_lanes"] = n
        elif number == 4 and length == 2 and n >= 576:
            out["inner_mtu"] = n
        elif number == 5 and length == 8:
            out["features"] = n
        elif number == 6 and length == 1 and n == 1:
            out["mode"] = "ethernet"
        elif number <= 6 and number > 0 or kind & 0x8000:
            raise Refused
    if out["version"] is None or out["ciphers"] is None:
        raise Refused
    return out


def choose_cipher(offer, own):
    if offer and own and offer[0] == own[0]:
        return own[0]
    common = [c for c in offer if c in own]
    return CHACHA if CHACHA in common else common[0] if common else None


# --- Sections 8 and 9: records and frames ------------------------------------------------------


def seal(cipher, key, receiver, counter, plaintext):
    aead = AESGCM(key) if cipher == AES else ChaCha20Poly1305(key)
    header = b"\x14" + u24(receiver) + u32(counter & 0xFFFFFFFF)
    return header + aead.encrypt(nonce12(counter), plaintext, None)


def whole_counter(greatest, low):
    """The counter with these low bits after the greatest one received: RFC 9000, appendix A.3."""
    expected = 0 if greatest is None else greatest + 1
    window = 2**32
    candidate = expected & ~(window - 1) | low
    if candidate <= expected - window // 2 and candidate < 2**64 - window:
        return candidate + window
    if candidate > expected + window // 2 and candidate >= window:
        return candidate - window
    return candidate


def stamp(position, time, follows_probe=False):
    return bytes([0x80 * follows_probe + position]) + u16(time)


def frame(kind, body, flags=0):
    return bytes([kind | flags]) + u16(len(body)) + body


def packet_frame(packet, partial=False):
    return frame(1, packet, 0x10 if partial else 0)


def slice_frame(id, offset, ends, gso, header, chunk, ecn=False):
    flags = (0x10 if ends else 0) | (0x20 if ecn else 0)
    return frame(2, u16(id) + u16(offset) + u16(gso) + header + chunk, flags)


def last_packet(packet, partial=False, at=0):
    """A PACKET with the flag LAST, whose IP header is at `at`; None: it is no IP."""
    df, folded = fold(packet, at, False)
    return bytes([1 | 0x80 | (0x10 if partial else 0) | (0x40 if df else 0)]) + folded


def last_slice(id, offset, ends, gso, header, chunk, ecn=False, at=0):
    df, folded = fold(header + chunk, at, True)
    first = 2 | 0x80 | (0x10 if ends else 0) | (0x20 if ecn else 0) | (0x40 if df else 0)
    return bytes([first]) + u16(id) + u16(offset) + u16(gso) + folded


def fragment_frame(id, offset, total, chunk, partial=False):
    return frame(3, u16(id) + u16(offset) + u16(total) + chunk, 0x10 if partial else 0)


def ports_frame(ports, *addresses):
    mapped = [ip_address(a if ":" in a else "::ffff:" + a).packed for a in addresses]
    return frame(7, u16(ports) + b"".join(mapped))


def health_frame(r):
    fields = ("received", "lost", "lost_first", "congestion_marks", "queueing_delay")
    body = b"".join(u32(r[f]) for f in fields) + u16(r["reordering"]) + u32(r["received_later"])
    return frame(4, body)


# --- Section 9: folded headers -----------------------------------------------------------------


def left_out(packet, at, is_slice, df):
    """The positions of the bytes that a folded packet leaves out, in order."""
    if at is None:
        return []
    if packet[at] >> 4 == 4:
        places = [2, 3] + ([6, 7] if df else []) + ([9] if is_slice else []) + [10, 11]
        tcp_at = (packet[at] & 15) * 4
    else:
        places = [4, 5] + ([6] if is_slice else [])
        tcp_at = 40
    if is_slice:
        places += [tcp_at + 16 + i for i in range(4)]
    return [at + place for place in places]


def fold(packet, at, is_slice):
    """Whether the packet has DF, and the packet without what the receiver computes."""
    df = at is not None and packet[at] >> 4 == 4 and packet[at + 6 : at + 8] == b"\x40\0"
    places = left_out(packet, at, is_slice, df)
    cut = len(packet) - len(places)
    folded, tail = bytearray(packet[:cut]), packet[cut:]
    for place, byte in zip(places, tail):
        folded[place] = byte
    return df, bytes(folded)


def unfold(folded, at, is_slice, df):
    places = left_out(folded, at, is_slice, df)
    packet = bytearray(folded + bytes(folded[place] for place in places))
    for place in places:
        packet[place] = 0
    if at is None:
        return bytes(packet)
    v4 = packet[at] >> 4 == 4
    if v4 and df:
        packet[at + 6] = 0x40
    if is_slice:
        packet[at + (9 if v4 else 6)] = 6
    elif v4:
        packet[at + 2 : at + 4] = be16(len(packet) - at)
        packet[at + 10 : at + 12] = be16(checksum(bytes(packet[at : at + 20])) ^ 0xFFFF)
    else:
        packet[at + 4 : at + 6] = be16(len(packet) - at - 40)
    return bytes(packet)


# --- Inner packets -----------------------------------------------------------------------------


def checksum(data):
    """The folded sum of 16-bit words, not complemented."""
    data += bytes(len(data) % 2)
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total >> 16) + (total & 0xFFFF)
    return total


def put(data, at, value):
    return data[:at] + value + data[at + len(value) :]


def be16(n):
    return struct.pack(">H", n)


def ip_header_len(packet):
    return 20 if packet[0] >> 4 == 4 else 40


def no_link(packet):
    """Offset of the IP header of a packet in IP mode."""
    return 0


def ethernet_link(frame):
    """Offset of the IP header of a frame in Ethernet mode, behind at most two tags; None if there is no IP."""
    at = 14
    while (kind := frame[at - 2 : at]) in (b"\x81\x00", b"\x88\xa8", b"\x91\x00") and at < 22:
        at += 4
    return at if kind in (b"\x08\x00", b"\x86\xdd") else None


def pseudo(packet):
    n = ip_header_len(packet)
    addresses = packet[12:20] if n == 20 else packet[8:40]
    protocol = packet[9] if n == 20 else packet[6]
    return checksum(addresses + struct.pack(">II", len(packet) - n, protocol))


def ip_packet(src, dst, protocol, transport, ecn=0, id=0, partial=False):
    """An IP packet around a TCP (6) or UDP (17) segment whose checksum field is filled here."""
    src, dst = ip_address(src), ip_address(dst)
    if src.version == 4:
        head = struct.pack(">BBHHHBBH", 0x45, ecn, 20 + len(transport), id, 0x4000, 64, protocol, 0)
        head += src.packed + dst.packed
        head = put(head, 10, be16(checksum(head) ^ 0xFFFF))
    else:
        head = struct.pack(">IHBB", 6 << 28 | ecn << 20, len(transport), protocol, 64)
        head += src.packed + dst.packed
    at = {6: 16, 17: 6}.get(protocol)
    if at is None:
        return head + transport
    packet = put(head + transport, len(head) + at, be16(pseudo(head + transport)))
    if not partial:
        check = checksum(packet[len(head) :]) ^ 0xFFFF
        packet = put(packet, len(head) + at, be16(check or 0xFFFF if protocol == 17 else check))
    return packet


def payload_bytes(n):
    return bytes((i * 7 + i // 251) % 256 for i in range(n))


def tcp(n, flags, seq=0xFFFFFC18, options=b"", ports=(8080, 80)):
    length = 20 + len(options)
    head = struct.pack(">HHIIBBHHH", *ports, seq, 0x01020304, length // 4 << 4, flags, 512, 0, 0)
    return head + options + payload_bytes(n)


def udp(n, ports=(1000, 2000)):
    return struct.pack(">HHHH", *ports, 8 + n, 0) + payload_bytes(n)


def vnet(flags=0, gso_type=0, hdr_len=0, gso=0, start=0, offset=0):
    return struct.pack("<BBHHHH", flags, gso_type, hdr_len, gso, start, offset)


def plain_write(packet, partial=False):
    """The write to the TUN device for a PACKET."""
    protocol = packet[9] if packet[0] >> 4 == 4 else packet[6]
    if partial:
        return vnet(1, 0, 0, 0, ip_header_len(packet), {6: 16, 17: 6}[protocol]) + packet
    return vnet() + packet


def framed(write, link):
    """The write for a packet, with the Ethernet header `link` before the packet."""
    flags, gso_type, hdr_len, gso, start, offset = struct.unpack_from("<BBHHHH", write)
    n = len(link)
    return vnet(flags, gso_type, hdr_len and hdr_len + n, gso, start and start + n, offset) + link + write[10:]


def any_write(packet, partial, link):
    at = link(packet)
    if at is None:
        return vnet() + packet
    return framed(plain_write(packet[at:], partial), packet[:at])


# --- Section 10: slices ------------------------------------------------------------------------


def run_write(slices):
    """What a run of contiguous slices leaves as: virtio-net header and one TCP packet."""
    first = slices[0]
    header, offset, gso = first["header"], first["offset"], first["gso"]
    payload = b"".join(s["chunk"] for s in slices)
    length = len(header) + len(payload)
    n = ip_header_len(header)
    if n == 20:
        (id,) = struct.unpack_from(">H", header, 4)
        header = put(header, 2, be16(length))
        header = put(header, 4, be16((id + offset // gso) & 0xFFFF))
        header = put(header, 10, bytes(2))
        header = put(header, 10, be16(checksum(header[:20]) ^ 0xFFFF))
    else:
        header = put(header, 4, be16(length - 40))
    (seq,) = struct.unpack_from(">I", header, n + 4)
    header = put(header, n + 4, struct.pack(">I", (seq + offset) & 0xFFFFFFFF))
    flags = header[n + 13]
    if offset:
        flags &= ~0x80
    if not slices[-1]["ends"]:
        flags &= ~0x09
    header = put(header, n + 13, bytes([flags]))
    header = put(header, n + 16, be16(pseudo(header + payload)))
    if len(payload) > gso:
        kind = (1 if n == 20 else 4) | (0x80 if first["ecn"] and not offset else 0)
        head = vnet(1, kind, len(header), gso, n, 16)
    else:
        head = vnet(1, 0, len(header), 0, n, 16)
    return head + header + payload


def parse_frames(plaintext, link):
    at = 3
    while at < len(plaintext) and plaintext[at] & 15:
        kind, flags = plaintext[at] & 15, plaintext[at] >> 4
        if kind in (1, 2) and flags & 8:
            fields = 6 if kind == 2 else 0
            body, folded = plaintext[at + 1 : at + 1 + fields], plaintext[at + 1 + fields :]
            yield kind, flags, body + unfold(folded, link(folded), kind == 2, bool(flags & 4))
            return
        (length,) = struct.unpack_from("<H", plaintext, at + 1)
        yield plaintext[at] & 15, plaintext[at] >> 4, plaintext[at + 3 : at + 3 + length]
        at += 3 + length


def receive(plaintexts, link=no_link):
    """The writes for a batch of records whose frames are well formed, of one peer, not marked CE."""
    writes, run, fragments = [], [], {}

    def flush():
        if run:
            at = link(run[0]["header"])
            headers = run[0]["header"]
            inner = [s | {"header": s["header"][at:]} for s in run]
            writes.append(framed(run_write(inner), headers[:at]))
            run.clear()

    for plaintext in plaintexts:
        for kind, flags, body in parse_frames(plaintext, link):
            if kind == 1:
                flush()
                writes.append(any_write(body, bool(flags & 1), link))
            elif kind == 2:
                id, offset, gso = struct.unpack_from("<HHH", body)
                at = link(body[6:])
                n = at + ip_header_len(body[6 + at :])
                n += (body[6 + n + 12] >> 4) * 4
                s = {"id": id, "offset": offset, "ends": bool(flags & 1), "gso": gso, "ecn": bool(flags & 2)}
                s["header"], s["chunk"] = body[6 : 6 + n], body[6 + n :]
                if run:
                    last = run[-1]
                    joins = last["id"] == id and not last["ends"]
                    joins &= last["offset"] + len(last["chunk"]) == offset
                    if not joins or len(run) == 64:
                        flush()
                run.append(s)
            elif kind == 3:
                id, offset, total = struct.unpack_from("<HHH", body)
                parts = fragments.setdefault((id, total), {})
                parts[offset] = body[6:]
                if sum(map(len, parts.values())) == total:
                    flush()
                    whole = b"".join(parts[o] for o in sorted(parts))
                    writes.append(any_write(whole, bool(flags & 1), link))
    flush()
    return writes


# --- Section 11: packing -----------------------------------------------------------------------


class Packer:
    """Packs reads of the TUN device into records of at most `size` bytes of UDP payload."""

    def __init__(self, size, time, first_id, link=no_link):
        self.size, self.time, self.id, self.link = size, time, first_id, link
        self.open, self.ecn, self.complete = b"", 0, False
        self.records = []  # (outer ECN, plaintext)
        self.run = None  # [ecn, segment size, datagrams, still open]

    def left(self):
        return 0 if self.complete else self.size - 8 - 16 - 3 - len(self.open)

    def run_goes_on(self):
        run = self.run
        return run and run[0] == self.ecn and run[3] and run[2] < 64 and (run[2] + 1) * run[1] <= 65487

    def close(self, more):
        if self.open:
            length = 27 + len(self.open)
            if more and not self.complete and self.run_goes_on():
                short = self.run[1] - length
                if 0 < short <= 400 and self.run[1] <= self.size:
                    self.open += bytes(short)
            self.seal()

    def seal(self):
        length = 27 + len(self.open)
        if self.run_goes_on() and length <= self.run[1]:
            position = self.run[2]
            self.run[2] += 1
            self.run[3] = length == self.run[1]
        else:
            position, self.run = 0, [self.ecn, length, 1, True]
        self.records.append((self.ecn, stamp(position, self.time) + self.open))
        self.open, self.complete = b"", False

    def read(self, read):
        flags, gso_type, _, gso, _, _ = struct.unpack_from("<BBHHHH", read)
        packet = read[10:]
        partial = bool(flags & 1)
        at = self.link(packet)
        inner = packet[at or 0 :]
        v4 = inner[0] >> 4 == 4
        ecn = 0 if at is None else inner[1] & 3 if v4 else inner[1] >> 4 & 3
        if ecn != self.ecn:
            self.close(False)
            self.ecn = ecn
        if gso_type & 0x7F in (1, 4):
            n = at + ip_header_len(inner)
            n += (packet[n + 12] >> 4) * 4
            self.slices(packet[:n], packet[n:], gso, bool(gso_type & 0x80))
        else:
            self.whole(packet, partial, at)

    def whole(self, packet, partial, at):
        ordinary, last = packet_frame(packet, partial), last_packet(packet, partial, at)
        if len(ordinary) <= self.size - 27:
            if len(ordinary) > self.left():
                self.close(True)
            self.open += ordinary
        elif len(last) <= self.size - 27:
            if len(last) > self.left():
                self.close(True)
            self.open, self.complete = self.open + last, True
        else:
            self.fragments(packet, partial)

    def slices(self, header, payload, gso, ecn):
        at = self.link(header)
        fixed = 9 + len(header)
        saved = 9 + len(header) + 256 - len(last_slice(0, 0, False, gso, header, bytes(256), at=at))
        records = -(-len(payload) // (self.size - 27 - fixed + saved))
        if records <= 64 and self.run_goes_on():
            run = self.run
            if run[2] + records > 64 or (run[2] + records) * run[1] > 65487:
                self.close(False)
        offset = 0
        while offset < len(payload):
            rest = len(payload) - offset
            saves = saved if rest >= 256 else 0
            if self.left() + saves < fixed + min(rest, 256):
                self.close(True)
            chunk = payload[offset : offset + min(rest, self.left() + saves - fixed)]
            parts = (self.id, offset, len(chunk) == rest, gso, header, chunk, ecn)
            if fixed + len(chunk) <= self.left():
                self.open += slice_frame(*parts)
            else:
                self.open, self.complete = self.open + last_slice(*parts, at=at), True
            offset += len(chunk)
        self.id += 1

    def fragments(self, packet, partial):
        offset = 0
        while offset < len(packet):
            rest = len(packet) - offset
            if self.left() < 9 + min(rest, 256):
                self.close(True)
            chunk = packet[offset : offset + min(rest, self.left() - 9)]
            self.open += fragment_frame(self.id, offset, len(packet), chunk, partial)
            offset += len(chunk)
        self.id += 1


# --- Section 12: path MTU ----------------------------------------------------------------------


def path_search(v6, limit):
    """Sizes probed on a path that carries `limit` bytes of UDP payload, and the size found."""
    overhead = 48 if v6 else 28
    common = [min(m - overhead, 65506) for m in (1280, 1360, 1420, 1460, 1492, 1500, 4096, 9001, 65535)]
    ethernet = 1500 - overhead
    confirmed, refused, probes = 1232, 65507, []
    while True:
        candidates = [c for c in common if confirmed < c < refused]
        if confirmed == 1232 and ethernet in candidates:
            size = ethernet
        elif candidates:
            size = candidates[-1] if confirmed < ethernet else candidates[0]
        elif refused - confirmed > 8:
            size = confirmed + (refused - confirmed) // 2
        else:
            return probes, confirmed
        probes.append(size)
        if size <= limit:
            confirmed, refused = size, max(refused, size + 1)
        else:
            refused = size


# --- Section 13: health ------------------------------------------------------------------------


def health_report(arrivals):
    """The report over (counter, byte 0 and time of the stamp, arrival in ms, CE), all records in one session."""
    r = dict.fromkeys(("received", "lost", "lost_first", "congestion_marks"), 0)
    r |= {"reordering": 0, "received_later": 0}
    seen, expected = set(), 0
    transit = base = total = 0
    last = None
    for counter, byte_0, time, ms, ce in arrivals:
        position = byte_0 & 0x7F
        if byte_0 & 0x80:
            seen |= set(range(expected, counter))
        r["received"] += 1
        r["congestion_marks"] += ce
        r["received_later"] += position > 0
        if counter >= expected:
            r["lost_first"] += position > 0 and counter - position >= expected
            r["lost"] += sum(1 for c in range(expected - 1024, counter + 1 - 1024) if c >= 0 and c not in seen)
            expected = counter + 1
        else:
            r["reordering"] = max(r["reordering"], expected - 1 - counter)
        seen.add(counter)
        now = ((ms * 65536) // 1000 - time) % 65536
        if last is not None:
            step = (now - last) % 65536
            transit += step - 65536 if step >= 32768 else step
        last = now
        base = min(base, transit)
        total += transit - base
    r["queueing_delay"] = round(total * 1e6 / 65536 / len(arrivals))
    return r


# --- The vectors -------------------------------------------------------------------------------

I4, R4, I6, R6 = "10.7.0.1", "10.7.0.2", "fd07::1", "fd07::2"
S_I, S_R, E_I, E_R, PSK, R_SECRET = (blake(b"seikan vector " + n) for n in
    (b"static initiator", b"static responder", b"ephemeral initiator", b"ephemeral responder", b"psk", b"cookie secret"))
INDEX_I, INDEX_R = 0x223344, 0xB2C3D4
WALL = (1_800_000_000, 123_456_789)


def noise_pair(psk=bytes(32), s_i=S_I, e_i=E_I, e_r=E_R):
    return Noise(PROLOGUE, s_i, e_i, S_R, e_r, psk)


def handshake(cipher, psk, offer, choice, records=None, batches=None):
    records, batches = records or RECORDS, batches or BATCHES
    noise = noise_pair(psk)
    first = initiation_message(noise, INDEX_I, tai64n(*WALL), offer)
    second = response_message(noise, INDEX_R, INDEX_I, choice)
    k_i, k_r = noise.keys()
    return {
        "name": NAMES[cipher] + (" with" if any(psk) else " without") + " pre-shared key",
        "cipher": cipher,
        "psk": psk,
        "unix_seconds": WALL[0],
        "unix_nanos": WALL[1],
        "timestamp": tai64n(*WALL),
        "offer": offer,
        "choice": choice,
        "initiation": first,
        "response": second,
        "key_initiator": k_i,
        "key_responder": k_r,
        "handshake_hash": noise.h,
        "record_datagrams": [seal(cipher, k_i, INDEX_R, r["counter"], r["plaintext"]) for r in records],
        "rejected_datagrams": rejected_datagrams(cipher, k_i, records),
        "batch_datagrams": [[seal(cipher, k_i, INDEX_R, c, r["plaintext"]) for c, r in enumerate(b["records"])]
                            for b in batches],
        "responder_datagram": seal(cipher, k_r, INDEX_I, 0, RESPONDER_RECORD["plaintext"]),
    }


def responder_record():
    packet = ip_packet(R4, I4, 17, udp(10))
    return {"plaintext": stamp(0, 7) + packet_frame(packet), "writes": [plain_write(packet)]}


REPORT = {"received": 100_001, "lost": 2, "lost_first": 1, "congestion_marks": 3, "queueing_delay": 1500,
          "reordering": 4, "received_later": 99_000}


def record_vectors():
    """Records made by hand, to be received in this order by the responder."""
    small = ip_packet(I4, R4, 17, udp(20))
    other = ip_packet(I6, R6, 17, udp(30, (1001, 2000)), partial=True)
    ect0 = ip_packet(I4, R4, 17, udp(20), ecn=2)
    ect1 = ip_packet(I4, R4, 17, udp(20), ecn=1)
    ce = ip_packet(I4, R4, 17, udp(20), ecn=3)
    header = ip_packet(I4, R4, 6, tcp(0, 0x10), partial=True)
    chunk = payload_bytes(100)

    def slice_of(id=1, offset=0, ends=True, gso=256, header=header, chunk=chunk):
        return slice_frame(id, offset, ends, gso, header, chunk)

    header6 = ip_packet(I6, R6, 6, tcp(0, 0x18, options=bytes([1, 1, 8, 10]) + bytes(8)), partial=True)
    run4 = {"header": header, "offset": 0, "ends": True, "gso": 256, "chunk": chunk, "ecn": False}
    run6 = {"header": header6, "offset": 512, "ends": False, "gso": 256, "chunk": payload_bytes(300), "ecn": False}
    unset = put(put(header, 6, bytes(2)), 10, bytes(2))
    routed = put(small, 6, bytes(2))
    routed = put(put(routed, 10, bytes(2)), 10, be16(checksum(put(routed, 10, bytes(2))[:20]) ^ 0xFFFF))

    split = ip_packet(I4, R4, 17, udp(300))
    icmp = ip_packet(I4, R4, 1, bytes(280))
    fragmented = put(header, 6, be16(0x2000))
    bad = {"bad_frame": 1}
    cases = [
        ("keepalive", b"", {}),
        ("packet", packet_frame(small), {"writes": [plain_write(small)]}),
        ("packet with partial checksum, packet, padding", packet_frame(other, True) + packet_frame(small) + bytes(40),
         {"writes": [plain_write(other, True), plain_write(small)]}),
        ("bytes behind the IP length", packet_frame(small + b"junk"), {"writes": [plain_write(small)]}),
        ("unknown kind, then a packet", frame(15, b"later") + packet_frame(small), {"writes": [plain_write(small)]}),
        ("padding ends the record", bytes([0xF0]) + packet_frame(small), {}),
        ("health", health_frame(REPORT), {"report": REPORT}),
        ("health, longer", frame(4, health_frame(REPORT)[3:] + b"more"), {"report": REPORT}),
        ("probe of 1472 bytes", frame(5, u16(0x0102)) + bytes(1472 - 27 - 5),
         {"answer": frame(6, u16(0x0102) + u16(1472))}),
        ("probe acknowledgement of a probe that was not sent", frame(6, u16(9) + u16(1472)), {}),
        ("ports of a symmetric NAT", ports_frame(256, "198.51.100.7", "2001:db8::7"), {}),
        ("ports, longer than there are addresses", frame(7, u16(1) + bytes(5 * 16 + 3)), {}),
        ("CE over ECT(0)", packet_frame(ect0), {"outer_ecn": 3, "writes": [plain_write(ce)]}),
        ("CE over Not-ECT", packet_frame(small), {"outer_ecn": 3, "drops": {"ecn_not_capable": 1}}),
        ("fragment, last of two", fragment_frame(7, 256, len(split), split[256:]), {}),
        ("fragment, first of two", fragment_frame(7, 0, len(split), split[:256]), {"writes": [plain_write(split)]}),
        ("no whole stamp", None, {"plaintext": b"\0\0", "drops": bad}),
        ("frame header cut off", packet_frame(small) + b"\x01\x00", {"writes": [plain_write(small)], "drops": bad}),
        ("length beyond the record", b"\x01" + u16(300) + small, {"drops": bad}),
        ("malformed frame, then a packet", frame(5, b"x") + packet_frame(small), {"drops": bad}),
        ("two packets continued in a record, then a packet",
         fragment_frame(9, 256, len(split), split[256:]) + fragment_frame(10, 256, len(split), split[256:]) + packet_frame(small),
         {"drops": bad}),
        ("fragment, the one that was taken", fragment_frame(9, 0, len(split), split[:256]), {"writes": [plain_write(split)]}),
        ("probe acknowledgement too short", frame(6, b"abc"), {"drops": bad}),
        ("ports too short", frame(7, b"x"), {"drops": bad}),
        ("health too short", frame(4, bytes(25)), {"drops": bad}),
        ("packet is not IP", packet_frame(b"\x50" + bytes(30)), {"drops": {"not_ip": 1}}),
        ("packet shorter than its length", packet_frame(small[:-1]), {"drops": {"not_ip": 1}}),
        ("partial checksum of ICMP", packet_frame(ip_packet(I4, R4, 1, bytes(20)), True), {"drops": bad}),
        ("partial checksum of an IP fragment", packet_frame(put(small, 6, be16(0x2000)), True), {"drops": bad}),
        ("partial checksum in fragments, first of two", fragment_frame(8, 0, 300, icmp[:256], True), {}),
        ("partial checksum in fragments, last of two", fragment_frame(8, 256, 300, icmp[256:], True), {"drops": bad}),
        ("source of somebody else", packet_frame(ip_packet("10.7.0.9", R4, 17, udp(20))), {"drops": {"source_not_allowed": 1}}),
        ("fragment that is whole", fragment_frame(1, 0, len(small), small), {"drops": bad}),
        ("fragment without bytes", fragment_frame(1, 0, 10, b""), {"drops": bad}),
        ("fragment beyond the packet", fragment_frame(1, 8, 10, b"abc"), {"drops": bad}),
        ("fragment below the least chunk that is not the last", fragment_frame(1, 0, 1000, bytes(255)), {"drops": bad}),
        ("two probes in a record", frame(5, u16(7)) + frame(5, u16(8)),
         {"answer": frame(6, u16(7) + u16(37)), "drops": bad}),
        ("slice without chunk", slice_of(chunk=b""), {"drops": bad}),
        ("slice with gso 0", slice_of(gso=0), {"drops": bad}),
        ("slice with gso below the least chunk", slice_of(gso=255), {"drops": bad}),
        ("slice below the least chunk that is not the last", slice_of(ends=False, chunk=bytes(255)), {"drops": bad}),
        ("slice of UDP", slice_of(header=put(header, 9, b"\x11")), {"drops": bad}),
        ("slice of an IP fragment", slice_of(header=fragmented), {"drops": bad}),
        ("slice that would be too large a packet", slice_of(offset=65_300, chunk=bytes(300)), {"drops": bad}),
        ("slice with headers cut off", frame(2, bytes(6) + header[:39]), {"drops": bad}),
        ("slice shorter than its fields", frame(2, bytes(5)), {"drops": bad}),
        ("ECT(1) over ECT(0)", packet_frame(ect0), {"outer_ecn": 1, "writes": [plain_write(ect1)]}),
        ("ECT(1) over CE", packet_frame(ce), {"outer_ecn": 1, "writes": [plain_write(ce)]}),
        ("ECT(0) over ECT(1)", packet_frame(ect1), {"outer_ecn": 2, "writes": [plain_write(ect1)]}),
        ("ECT(1) over Not-ECT", packet_frame(small), {"outer_ecn": 1, "writes": [plain_write(small)]}),
        ("packet, then the last one", packet_frame(other, True) + last_packet(small),
         {"writes": [plain_write(other, True), plain_write(small)]}),
        ("last packet over IPv6, partial checksum", last_packet(other, True), {"writes": [plain_write(other, True)]}),
        ("last packet without DF", last_packet(routed), {"writes": [plain_write(routed)]}),
        ("last packet, CE over ECT(0)", last_packet(ect0), {"outer_ecn": 3, "writes": [plain_write(ce)]}),
        ("last slice", last_slice(1, 0, True, 256, header, chunk), {"writes": [run_write([run4])]}),
        ("last slice without DF", last_slice(1, 0, True, 256, unset, chunk),
         {"writes": [run_write([run4 | {"header": unset}])]}),
        ("last slice over IPv6 that does not end the super-packet",
         last_slice(1, 512, False, 256, header6, run6["chunk"]), {"writes": [run_write([run6])]}),
        ("last packet shorter than a header of IPv4", b"\xc1" + small[:19], {"drops": {"not_ip": 1}}),
        ("last packet shorter than a header of IPv6", b"\x81" + other[:39], {"drops": {"not_ip": 1}}),
        ("last packet of nothing", b"\x81", {"drops": {"not_ip": 1}}),
        ("last packet with a header longer than itself", put(last_packet(small), 1, b"\x4f"), {"drops": {"not_ip": 1}}),
        ("last slice shorter than its fields", b"\xc2" + bytes(5), {"drops": bad}),
        ("last slice with headers cut off", b"\xd2" + bytes(6) + header[:39], {"drops": bad}),
        ("last slice below the least chunk that is not the last", last_slice(1, 0, False, 256, header, bytes(255)),
         {"drops": bad}),
        ("last slice of IPv4 with a header of 16 bytes", b"\xd2" + bytes(6) + b"\x44" + header[1:] + chunk, {"drops": bad}),
    ]
    return numbered(cases)


def numbered(cases):
    """Records of frames in the order of their counters."""
    records = []
    for counter, (name, frames, extra) in enumerate(cases):
        plaintext = extra.pop("plaintext", None) or stamp(0, 1000 + counter) + frames
        record = {"name": name, "counter": counter, "outer_ecn": 0, "plaintext": plaintext, "writes": [], "drops": {}}
        records.append(record | extra)
    return records


def rejected_datagrams(cipher, key, records):
    """Datagrams to the responder, behind those of the records, that are dropped whole."""
    good = seal(cipher, key, INDEX_R, 1, records[1]["plaintext"])
    next = len(records)
    fresh = seal(cipher, key, INDEX_R, next, stamp(0, 0))
    rejected = [
        ("replayed", good, "replayed"),
        ("tag altered", put(fresh, len(fresh) - 1, bytes([fresh[-1] ^ 1])), "bad_tag"),
        ("counter altered", put(fresh, 4, u32(next + 1)), "bad_tag"),
        ("another index", put(fresh, 1, u24(INDEX_R ^ 0x800000)), "unknown_index"),
        ("23 bytes", fresh[:23], "truncated"),
        ("counter 2^32 ahead", seal(cipher, key, INDEX_R, 2**32 + next, stamp(0, 0)), "bad_tag"),
        ("type of WireGuard", put(fresh, 0, b"\4"), "unknown_type"),
    ]
    return [{"name": n, "datagram": d, "reason": r} for n, d, r in rejected]


def batch_vectors():
    """Reads of the TUN device, the records that carry them, the writes at the far end."""
    options = bytes([1, 1, 8, 10]) + bytes(8)
    two = ip_packet(I4, R4, 6, tcp(2000, 0x99), id=0xFFFF, partial=True)
    four = ip_packet(I6, R6, 6, tcp(4000, 0x18, options=options), ecn=2, partial=True)
    equal = ip_packet(I4, R4, 6, tcp(3 * 1157, 0x18, options=options), partial=True)
    large = ip_packet(I4, R4, 17, udp(2000))
    tcp_packet = ip_packet(I4, R4, 6, tcp(400, 0x18, ports=(1, 2)), partial=True)
    packets = [ip_packet(I4, R4, 17, udp(n, (3000 + n, 53)), ecn=e) for n, e in ((100, 0), (500, 0), (700, 0), (50, 1), (60, 1))]
    full = [ip_packet(I4, R4, 17, udp(1182)), ip_packet(I6, R6, 17, udp(1158)), ip_packet(I4, R4, 17, udp(1183))]
    falling = [ip_packet(I4, R4, 17, udp(n, (3000 + n, 53))) for n in (1100, 1000, 900)]
    cases = [
        ("IPv4 super-packet in two slices", [vnet(1, 0x81, 40, 900, 20, 16) + two], [[0, 1], [0], [1]]),
        ("IPv6 super-packet in four slices", [vnet(1, 4, 72, 1348, 40, 16) + four],
         [[0, 1, 2, 3], [1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2], [1, 3], [0, 2, 1, 3]]),
        ("segments of which each fills a record", [vnet(1, 1, 52, 1157, 20, 16) + equal], [[0, 1, 2], [0, 2]]),
        ("fragments", [vnet() + large], [[0, 1], [1, 0], [0]]),
        ("small packets, one with a partial checksum, two markings",
         [vnet() + p for p in packets] + [vnet(1, 0, 0, 0, 20, 16) + tcp_packet], None),
        ("padding keeps the batch going", [vnet() + p for p in falling], None),
        ("the longest packets that one record takes, and a longer one", [vnet() + p for p in full], None),
        ("slices of one super-packet and the next share a record",
         [vnet(1, 0x81, 40, 900, 20, 16) + two, vnet(1, 1, 40, 900, 20, 16) + put(two, 22, be16(81))], None),
    ]
    return packed(cases, no_link)


def packed(cases, link):
    """Batches of reads, packed."""
    batches = []
    for name, reads, outcomes in cases:
        packer = Packer(1232, 0xBEEF, 0xFFFF, link)
        for read in reads:
            packer.read(read)
            packer.id &= 0xFFFF
        packer.close(False)
        plaintexts = [p for _, p in packer.records]
        batches.append({
            "name": name, "size": 1232, "time": 0xBEEF, "first_id": 0xFFFF, "reads": reads,
            "records": [{"outer_ecn": e, "plaintext": p} for e, p in packer.records],
            "outcomes": [{"received": o, "writes": receive([plaintexts[i] for i in o], link)}
                         for o in outcomes or [list(range(len(plaintexts)))]],
        })
    return batches


MAC_I, MAC_R, GROUP = bytes.fromhex("02005e100001"), bytes.fromhex("02005e100002"), bytes([255] * 6)
IPV4, IPV6, ARP = b"\x08\x00", b"\x86\xdd", b"\x08\x06"
TAG, PROVIDER_TAG = b"\x81\x00\xa0\x07", b"\x88\xa8\x00\x05"


def ethernet_record_vectors():
    """Records in Ethernet mode, to be received in this order by the responder."""
    head = MAC_R + MAC_I
    small = ip_packet(I4, R4, 17, udp(20))
    other = ip_packet(I6, R6, 17, udp(30, (1001, 2000)), partial=True)
    ect0 = ip_packet(I4, R4, 17, udp(20), ecn=2)
    ce = ip_packet(I4, R4, 17, udp(20), ecn=3)
    arp = GROUP + MAC_I + ARP + payload_bytes(46)
    tagged_arp = GROUP + MAC_I + PROVIDER_TAG + TAG + ARP + payload_bytes(46)
    llc = bytes.fromhex("0180c2000000") + MAC_I + be16(38) + payload_bytes(46)
    header = head + TAG + IPV4 + ip_packet(I4, R4, 6, tcp(0, 0x10), partial=True)
    chunk = payload_bytes(100)
    run = run_write([{"header": header[18:], "offset": 0, "gso": 256, "chunk": chunk, "ends": True, "ecn": False}])
    split = head + TAG + ARP + payload_bytes(300)
    stranger = ip_packet("10.7.0.9", R4, 17, udp(20))

    def case(name, frame, **extra):
        return name, packet_frame(frame), extra

    def whole(name, frame, partial=False):
        return name, packet_frame(frame, partial), {"writes": [any_write(frame, partial, ethernet_link)]}

    bad = {"bad_frame": 1}
    return numbered([
        whole("ARP", arp),
        whole("a type behind two tags", tagged_arp),
        whole("IEEE 802.3 length", llc),
        whole("IPv4", head + IPV4 + small),
        whole("IPv6 behind a tag, partial checksum", head + TAG + IPV6 + other, True),
        case("padding behind the IP length", head + IPV4 + small + bytes(4),
             writes=[any_write(head + IPV4 + small, False, ethernet_link)]),
        case("IP behind three tags counts as any type", head + TAG * 3 + IPV4 + small,
             writes=[vnet() + head + TAG * 3 + IPV4 + small]),
        ("slice", slice_frame(1, 0, True, 256, header, chunk), {"writes": [framed(run, header[:18])]}),
        ("slice of a frame without IP", slice_frame(1, 0, True, 256, head + ARP + bytes(60), chunk), {"drops": bad}),
        ("last slice", last_slice(1, 0, True, 256, header, chunk, at=18), {"writes": [framed(run, header[:18])]}),
        ("last slice of a frame without IP", b"\xd2" + bytes(4) + u16(256) + head + ARP + bytes(160), {"drops": bad}),
        ("last packet", last_packet(head + IPV4 + small, at=14), {"writes": [any_write(head + IPV4 + small, False, ethernet_link)]}),
        ("last packet without IP", last_packet(arp, at=None), {"writes": [vnet() + arp]}),
        ("fragment, last of two", fragment_frame(7, 256, len(split), split[256:]), {}),
        ("fragment, first of two", fragment_frame(7, 0, len(split), split[:256]), {"writes": [vnet() + split]}),
        ("CE over ECT(0)", packet_frame(head + IPV4 + ect0),
         {"outer_ecn": 3, "writes": [any_write(head + IPV4 + ce, False, ethernet_link)]}),
        ("CE over a frame without IP", packet_frame(arp), {"outer_ecn": 3, "drops": {"ecn_not_capable": 1}}),
        case("13 bytes", head + b"\x08", drops={"bad_ethernet": 1}),
        case("a tag cut off", head + TAG, drops={"bad_ethernet": 1}),
        case("the type of IPv4, but no IP", head + IPV4 + bytes(40), drops={"not_ip": 1}),
        ("partial checksum without IP", packet_frame(arp, True), {"drops": bad}),
        case("from a group", MAC_R + GROUP + ARP + bytes(46), drops={"bad_ethernet": 1}),
        case("from no address", MAC_R + bytes(6) + ARP + bytes(46), drops={"bad_ethernet": 1}),
        case("from the receiver's own address", GROUP + MAC_R + ARP + bytes(46), drops={"mac_conflict": 1}),
        case("source of somebody else", head + IPV4 + stranger, drops={"source_not_allowed": 1}),
    ])


def ethernet_batch_vectors():
    """Reads of the TAP device, the records that carry them, the writes at the far end."""
    head = MAC_R + MAC_I + TAG + IPV4
    two = head + ip_packet(I4, R4, 6, tcp(2000, 0x99), id=0xFFFF, partial=True)
    small = head + ip_packet(I4, R4, 17, udp(100), ecn=1)
    arp = GROUP + MAC_I + ARP + payload_bytes(46)
    large = MAC_R + MAC_I + b"\x88\xb5" + payload_bytes(1406)
    return packed([
        ("super-packet in two slices", [vnet(1, 0x81, 58, 900, 38, 16) + two], [[0, 1], [0], [1]]),
        ("a frame without IP in fragments", [vnet() + large], [[0, 1], [1, 0]]),
        ("frames with and without IP", [vnet() + arp, vnet() + small, vnet() + arp], None),
    ], ethernet_link)


def ethernet_vectors():
    records, batches = ethernet_record_vectors(), ethernet_batch_vectors()
    offer, choice = capabilities([AES, CHACHA], ethernet=True), capabilities([AES], ethernet=True)
    made = handshake(AES, bytes(32), offer, choice, records, batches)
    del made["responder_datagram"]
    return {"mac": {"initiator": MAC_I, "responder": MAC_R}, "handshake": made | {"mode": "ethernet"},
            "records": records, "batches": batches}


def rejected_handshakes():
    """Messages to the responder that are dropped, each to a host that has seen the good initiation."""
    offer = capabilities([AES, CHACHA])
    later = tai64n(WALL[0] + 1, 0)

    def initiation(payload=offer, when=later, **keys):
        return initiation_message(noise_pair(**keys), INDEX_I + 1, when, payload)

    def remac(message):
        return with_macs(message[:-32], public(S_R))

    good = initiation()
    cases = [
        ("mac1 altered", put(good, len(good) - 32, bytes([good[-32] ^ 1])), "bad_mac1"),
        ("mac1 of the WireGuard label", good[:-32] + mac(blake(b"mac1----" + public(S_R)), good[:-32]) + bytes(16), "bad_mac1"),
        ("147 bytes", remac(bytes([0x11, 0, 0, 0]) + bytes(143)), "truncated"),
        ("more than 256 bytes of payload", initiation(bytes(257)), "truncated"),
        ("reserved byte set", remac(put(good, 1, b"\1")), "unknown_type"),
        ("sender index of 25 bits", remac(put(good, 4, u32(1 << 24))), "unknown_type"),
        ("sealed static altered", remac(put(good, 40, bytes([good[40] ^ 1]))), "bad_handshake"),
        ("ephemeral of low order", remac(put(good, 8, bytes(32))), "bad_handshake"),
        ("a key that is no peer's", initiation(s_i=PSK), "unknown_peer"),
        ("stamp of the last initiation", initiation(when=tai64n(*WALL)), "replayed_handshake"),
        ("unknown mandatory capability", initiation(offer + tlv(0x8177, b"")), "unsupported_capability"),
        ("Ethernet frames to an end with IP packets", initiation(capabilities([AES], ethernet=True)), "unsupported_capability"),
        ("no cipher in common", initiation(capabilities([77])), "unsupported_capability"),
        ("response that answers nothing", with_macs(bytes([0x12, 0, 0, 0]) + bytes(56), public(S_R)), "unknown_index"),
        ("cookie reply that answers nothing", bytes([0x13, 0, 0, 0]) + bytes(60), "unknown_index"),
    ]
    return [{"name": n, "message": m, "reason": r} for n, m, r in cases]


def rejected_responses():
    """Responses to the good initiation that are refused."""
    choice = capabilities([AES])

    def response(payload, psk=bytes(32), receiver=INDEX_I):
        noise = noise_pair(psk)
        initiation_message(noise, INDEX_I, tai64n(*WALL), capabilities([AES, CHACHA]))
        return response_message(noise, INDEX_R, receiver, payload)

    cases = [
        ("another pre-shared key", response(choice, PSK), "bad_handshake"),
        ("another index", response(choice, receiver=INDEX_I ^ 0x800000), "unknown_index"),
        ("two ciphers chosen", response(capabilities([AES, CHACHA])), "unsupported_capability"),
        ("a newer version", response(capabilities([AES], version=2)), "unsupported_capability"),
        ("Ethernet frames chosen", response(capabilities([AES], ethernet=True)), "unsupported_capability"),
    ]
    return [{"name": n, "message": m, "reason": r} for n, m, r in cases]


def capability_vectors():
    least = tlv(0x8001, b"\1") + tlv(0x8002, b"\1\2")
    payloads = [
        ("all", capabilities([AES, CHACHA], 65535, 4, 5)),
        ("the least", least),
        ("unknown optional", least + tlv(0x0177, b"abc")),
        ("unknown mandatory", least + tlv(0x8177, b"")),
        ("known without the mandatory bit", tlv(1, b"\1") + tlv(2, b"\2")),
        ("unknown ciphers", tlv(0x8001, b"\1") + tlv(0x8002, bytes([77, 2, 78, 1]))),
        ("cipher twice", tlv(0x8001, b"\1") + tlv(0x8002, b"\1\1")),
        ("version 0", tlv(0x8001, b"\0") + tlv(0x8002, b"\1")),
        ("no version", tlv(0x8002, b"\1")),
        ("no ciphers", tlv(0x8001, b"\1")),
        ("repeated", least + tlv(3, b"\1") + tlv(3, b"\1")),
        ("out of order", least + tlv(4, u16(1420)) + tlv(3, b"\1")),
        ("MTU below 576", least + tlv(4, u16(575))),
        ("MTU of 576", least + tlv(4, u16(576))),
        ("features of four bytes", least + tlv(5, bytes(4))),
        ("Ethernet frames", capabilities([AES], ethernet=True)),
        ("an unknown mode", least + tlv(0x8006, b"\2")),
        ("a mode of two bytes", least + tlv(0x8006, b"\1\0")),
        ("ends within a head", least + b"\3\0\1"),
        ("ends within a value", least + u16(3) + u16(2) + b"\1"),
        ("257 bytes", least + tlv(0x100, bytes(257 - len(least) - 4))),
        ("256 bytes", least + tlv(0x100, bytes(256 - len(least) - 4))),
    ]
    out = []
    for name, payload in payloads:
        try:
            parsed = parse_capabilities(payload)
        except Refused:
            parsed = None
        out.append({"name": name, "payload": payload, "parsed": parsed})
    return out


def cipher_choices():
    lists = [[], [AES], [CHACHA], [AES, CHACHA], [CHACHA, AES]]
    return [{"offer": o, "own": w, "chosen": choose_cipher(o, w)} for o in lists for w in lists]


def cookie_vectors():
    replier = public(S_R)
    nonce = bytes(range(24))
    out = []
    for address, port in (("192.0.2.1", 51820), ("2001:db8::1", 65535)):
        first = initiation_message(noise_pair(), INDEX_I, tai64n(*WALL), b"")
        cookie = cookie_of(R_SECRET, address, port)
        second = initiation_message(noise_pair(e_i=E_R), INDEX_I + 1, tai64n(WALL[0] + 5, 0), b"", cookie)
        out.append({"address": address, "port": port, "secret": R_SECRET, "nonce": nonce, "initiation": first,
                    "cookie": cookie, "reply": cookie_reply(first, replier, nonce, cookie),
                    "ephemeral": E_R, "unix_seconds": WALL[0] + 5, "initiation_with_mac2": second})
    return out


def health_vector():
    arrivals = []
    for c in range(3000):
        batch, position = divmod(c, 40)
        if c % 100 == 50 or batch == 10 and position == 0:
            continue  # lost; c = 400 is the first of its batch
        if 70 <= c < 75 or c == 110:
            continue  # probes
        after_probe = c in (75, 111)
        delay = batch % 5  # ms
        arrivals.append((c, 0x80 * after_probe + position, batch * 2 * 65536 // 1000, batch * 2 + delay, int(c % 500 == 0)))
    arrivals[1500], arrivals[1520] = arrivals[1520], arrivals[1500]
    return {"arrivals": arrivals, "report": health_report(arrivals)}


def path_vectors():
    out = []
    for v6, limit in ((False, 1472), (False, 1372), (False, 8972), (True, 1452), (True, 1232), (False, 65507)):
        probes, found = path_search(v6, limit)
        out.append({"v6": v6, "limit": limit, "probes": probes, "found": found})
    return out


def field(a, b):
    """The product in GF(2^8) with x^8 + x^4 + x^3 + x^2 + 1, by schoolbook multiplication and division."""
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(15, 7, -1):
        if product >> bit & 1:
            product ^= 0x11D << bit - 8
    return product


def inverse(a):
    return next(b for b in range(1, 256) if field(a, b) == 1)


def parity_symbols(records, numbers):
    """The symbols of the parity records with these numbers for a block of records, given by their frames."""
    symbols = [u16(len(frames)) + frames if frames else b"" for frames in records]
    size = max(map(len, symbols))
    out = []
    for number in numbers:
        y, total = 128 + number, bytearray(size)
        for i, symbol in enumerate(symbols):
            factor = field(y, inverse(i ^ y))
            for at, byte in enumerate(symbol):
                total[at] ^= field(factor, byte)
        out.append(bytes(total))
    return out


def parity_vectors():
    """Blocks of records, the symbols of their parity, and lost records that these restore."""
    def frames(n, length):
        return bytes((n * 37 + i * 11) & 0xFF for i in range(length))

    out = []
    for lengths, numbers, lost in (
        ([40], [0, 1], [0]),
        ([30, 0, 7, 30, 1], [0], [3]),
        ([30, 0, 7, 30, 1], [2, 0], [4, 2]),
        ([5] * 128, list(range(16)), list(range(100, 116))),
    ):
        records = [frames(n, length) for n, length in enumerate(lengths)]
        out.append({"records": records, "numbers": numbers, "symbols": parity_symbols(records, numbers), "lost": lost})
    return out


def counter_vectors():
    """Counters by their low 32 bits, after the greatest one received."""
    cases = [(None, 0), (None, 7), (10, 3), (10, 11), (2**32 - 2, 2**32 - 1), (2**32 - 1, 0), (2**32 - 1, 2**32 - 9),
             (2**32 + 5, 2**32 - 1), (2**32 + 5, 4), (7 * 2**32, 2**31), (7 * 2**32, 2**31 + 5), (2**40 + 99, 50)]
    return [{"greatest": g, "low": low, "counter": whole_counter(g, low)} for g, low in cases]


def self_check():
    """This implementation against published vectors: RFC 7748 6.1, draft-irtf-cfrg-xchacha 2.2.1, Noise."""
    alice = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob_public = bytes.fromhex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
    assert dh(alice, bob_public).hex() == "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    nonce = bytes.fromhex("000000090000004a0000000031415927")
    assert hchacha20(bytes(range(32)), nonce).hex() == "82413b4227b27bfed30e42508a877d73a0f9e4d58a74a853c12ec41326d3ecdc"
    text = (ROOT / "crates/proto/testdata/noise-ikpsk2.txt").read_text()
    v = dict(line.split(" ") for line in text.splitlines() if not line.startswith("#"))
    v = {k: bytes.fromhex(x) for k, x in v.items()}
    noise = Noise(v["init_prologue"], v["init_static"], v["init_ephemeral"], v["resp_static"], v["resp_ephemeral"], v["psk"])
    assert noise.initiation(v["payload_0"]) == v["ciphertext_0"]
    assert noise.response(v["payload_1"]) == v["ciphertext_1"]
    assert noise.h == v["handshake_hash"]
    k_i, k_r = noise.keys()
    for i in range(2, 6):
        key, n = ((k_i, k_r)[i % 2], (i - 2) // 2)
        assert ChaCha20Poly1305(key).encrypt(nonce12(n), v[f"payload_{i}"], None) == v[f"ciphertext_{i}"]


RECORDS, BATCHES, RESPONDER_RECORD = record_vectors(), batch_vectors(), responder_record()


def vectors():
    offer = capabilities([AES, CHACHA])
    odd = tlv(0x8001, b"\3") + tlv(0x8002, bytes([CHACHA, 77, AES])) + tlv(4, u16(65535)) + tlv(5, bytes([255] * 8)) + tlv(0x0101, b"later")
    return {
        "about": "Vectors of docs/internals/protocol.md, made by scripts/protocol_vectors.py. Bytes are hexadecimal.",
        "inner": {"initiator": [I4, I6], "responder": [R4, R6]},
        "initiator": {"private": S_I, "public": public(S_I), "ephemeral": E_I, "index": INDEX_I},
        "responder": {"private": S_R, "public": public(S_R), "ephemeral": E_R, "index": INDEX_R,
                      "ciphers": [AES, CHACHA]},
        "stamps": [{"unix_seconds": s, "unix_nanos": n, "stamp": tai64n(s, n)} for s, n in ((0, 0), WALL, (1, 999_999_999))],
        "capabilities": capability_vectors(),
        "cipher_choices": cipher_choices(),
        "records": RECORDS,
        "batches": BATCHES,
        "responder_record": RESPONDER_RECORD,
        "handshakes": [handshake(AES, bytes(32), offer, capabilities([AES])),
                       handshake(CHACHA, PSK, odd, capabilities([CHACHA]))],
        "ethernet": ethernet_vectors(),
        "rejected_handshakes": rejected_handshakes(),
        "rejected_responses": rejected_responses(),
        "cookies": cookie_vectors(),
        "path_mtu": path_vectors(),
        "health": health_vector(),
        "parity": parity_vectors(),
        "counters": counter_vectors(),
    }


def hexed(x):
    if isinstance(x, bytes):
        return x.hex()
    if isinstance(x, dict):
        return {k: hexed(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [hexed(v) for v in x]
    return x


def render(x, indent=0):
    """JSON with short lists of numbers on one line."""
    pad = " " * indent
    if isinstance(x, dict) and x:
        items = [f'{pad} {json.dumps(k)}: {render(v, indent + 1)}' for k, v in x.items()]
        return "{\n" + ",\n".join(items) + f"\n{pad}}}"
    if isinstance(x, list) and any(isinstance(v, (dict, str)) for v in x):
        return "[\n" + ",\n".join(f"{pad} {render(v, indent + 1)}" for v in x) + f"\n{pad}]"
    return json.dumps(x)


def main():
    self_check()
    text = render(hexed(vectors())) + "\n"
    if "--check" not in sys.argv[1:]:
        sys.stdout.write(text)
    elif (ROOT / "docs/internals/protocol-vectors.json").read_text() != text:
        sys.exit("docs/internals/protocol-vectors.json is not what scripts/protocol_vectors.py makes")


if __name__ == "__main__":
    main()
