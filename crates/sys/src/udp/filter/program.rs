//! The program of the socket filter, assembled here: it is short, and a compiler for eBPF would be a build
//! dependency of every user.

use std::mem::offset_of;

use super::{GROUPS, SETS, Shared, WAYS};

/// One instruction (linux/bpf.h, `struct bpf_insn`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

fn instruction(code: u8, to: u8, from: u8, offset: i16, immediate: i32) -> Instruction {
    // Two bit fields, in the byte order of the machine.
    let registers = if cfg!(target_endian = "little") {
        from << 4 | to
    } else {
        to << 4 | from
    };
    Instruction {
        code,
        registers,
        offset,
        immediate,
    }
}

/// The ends of the program, and the start of its second part.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Label {
    Accept,
    Oversized,
    Malformed,
    Limited,
    Drop,
    Ipv6,
    Source,
}

/// Instructions and jumps to labels, which are resolved at the end.
#[derive(Default)]
struct Assembler {
    code: Vec<Instruction>,
    jumps: Vec<(usize, Label)>,
    labels: Vec<(Label, usize)>,
}

// Registers. Calls and loads of packet bytes clear 1 to 5.
const RESULT: u8 = 0;
const A: u8 = 2;
const B: u8 = 3;
const PACKET: u8 = 6;
const MAP: u8 = 7;
/// Length of each joined datagram, or of the only one; later the hash of the source.
const LENGTH: u8 = 8;
const HASH: u8 = 8;
/// Number of joined datagrams.
const DATAGRAMS: u8 = 9;
/// The end of the stack. The last eight bytes hold the hash of the address.
const STACK: u8 = 10;

const SET_64: u8 = 0x18; // BPF_LD | BPF_DW | BPF_IMM, two instructions long
const LOAD: u8 = 0x61; // BPF_LDX | BPF_W | BPF_MEM
const LOAD_16: u8 = 0x69; // BPF_LDX | BPF_H | BPF_MEM
const LOAD_64: u8 = 0x79; // BPF_LDX | BPF_DW | BPF_MEM
const STORE_64: u8 = 0x7b; // BPF_STX | BPF_DW | BPF_MEM
const PACKET_8: u8 = 0x30; // BPF_LD | BPF_B | BPF_ABS: of the packet in PACKET, into RESULT
const PACKET_16: u8 = 0x28; // BPF_LD | BPF_H | BPF_ABS
const PACKET_32: u8 = 0x20; // BPF_LD | BPF_W | BPF_ABS
const ADD_TO: u8 = 0xdb; // BPF_STX | BPF_DW | BPF_ATOMIC, with 0: BPF_ADD
const COPY: u8 = 0xbf; // BPF_ALU64 | BPF_MOV | BPF_X
const COPY_32: u8 = 0xbc; // BPF_ALU | BPF_MOV | BPF_X: clears the upper half
const SET: u8 = 0xb7; // BPF_ALU64 | BPF_MOV | BPF_K
const SET_32: u8 = 0xb4; // BPF_ALU | BPF_MOV | BPF_K
const ADD: u8 = 0x0f; // BPF_ALU64 | BPF_ADD | BPF_X
const SUBTRACT: u8 = 0x17; // BPF_ALU64 | BPF_SUB | BPF_K
const NEGATE: u8 = 0x87; // BPF_ALU64 | BPF_NEG
const MULTIPLY: u8 = 0x2f; // BPF_ALU64 | BPF_MUL | BPF_X
const XOR: u8 = 0xaf; // BPF_ALU64 | BPF_XOR | BPF_X
const OR: u8 = 0x47; // BPF_ALU64 | BPF_OR | BPF_K
const AND: u8 = 0x57; // BPF_ALU64 | BPF_AND | BPF_K
const SHIFT_LEFT: u8 = 0x67; // BPF_ALU64 | BPF_LSH | BPF_K
const SHIFT_RIGHT: u8 = 0x77; // BPF_ALU64 | BPF_RSH | BPF_K
const IF_EQUAL: u8 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const IF_SAME: u8 = 0x1d; // BPF_JMP | BPF_JEQ | BPF_X
const IF_OTHER: u8 = 0x55; // BPF_JMP | BPF_JNE | BPF_K
const IF_GREATER: u8 = 0x2d; // BPF_JMP | BPF_JGT | BPF_X
const IF_AT_MOST: u8 = 0xd5; // BPF_JMP | BPF_JSLE | BPF_K
const JUMP: u8 = 0x05; // BPF_JMP | BPF_JA
const EXIT: u8 = 0x95; // BPF_JMP | BPF_EXIT

/// `BPF_PSEUDO_MAP_VALUE`: the immediate is a map, and the register gets the address of its first element.
const MAP_VALUE: u8 = 2;
/// Fields of `struct __sk_buff`.
const LEN: i16 = 0;
const PROTOCOL: i16 = 16;
const IFINDEX: i16 = 40;
const GSO_SEGS: i16 = 164;
const GSO_SIZE: i16 = 176;
/// `SKF_NET_OFF` (linux/filter.h): offsets of packet bytes from here on count from the IP header. Others
/// count from the UDP header.
const IP_HEADER: i32 = -0x10_0000;
/// Offsets of the source address in the headers of IPv4 and IPv6.
const IPV4_SOURCE: i32 = IP_HEADER + 12;
const IPV6_SOURCE: i32 = IP_HEADER + 8;
const SOURCE_PORT: i32 = 0;
const UDP_HEADER: i32 = 8;
/// `ETH_P_IPV6` (linux/if_ether.h), in network byte order as in `struct __sk_buff`.
const IPV6: i32 = 0x86dd_u16.to_be() as i32;
/// Index of the loopback interface in every namespace (net/flow.h).
const LOOPBACK_IFINDEX: i32 = 1;

impl Assembler {
    fn push(&mut self, code: u8, to: u8, from: u8, offset: usize, immediate: i32) {
        let offset = i16::try_from(offset).expect("a field within 32 KiB");
        self.code
            .push(instruction(code, to, from, offset, immediate));
    }

    fn set(&mut self, code: u8, to: u8, immediate: i32) {
        self.push(code, to, 0, 0, immediate);
    }

    fn combine(&mut self, code: u8, to: u8, from: u8) {
        self.push(code, to, from, 0, 0);
    }

    /// Loads a field of the packet's description.
    fn field(&mut self, to: u8, field: i16) {
        self.code.push(instruction(LOAD, to, PACKET, field, 0));
    }

    fn jump(&mut self, code: u8, to: u8, from: u8, immediate: i32, label: Label) {
        self.jumps.push((self.code.len(), label));
        self.push(code, to, from, 0, immediate);
    }

    /// Skips the next instruction if the register is not zero.
    fn skip_unless_zero(&mut self, register: u8) {
        self.push(IF_OTHER, register, 0, 1, 0);
    }

    fn label(&mut self, label: Label) {
        self.labels.push((label, self.code.len()));
    }

    /// `mix` of the parent module, with bytes of the packet.
    fn mix(&mut self, load: u8, offset: i32) {
        self.set(load, RESULT, offset);
        self.combine(XOR, HASH, RESULT);
        self.push(LOAD_64, A, MAP, offset_of!(Shared, keys) + 8, 0);
        self.combine(MULTIPLY, HASH, A);
        self.combine(COPY, A, HASH);
        self.set(SHIFT_RIGHT, A, 32);
        self.combine(XOR, HASH, A);
    }

    fn store_hash(&mut self) {
        self.code.push(instruction(STORE_64, STACK, HASH, -8, 0));
    }

    fn load_hash(&mut self) {
        self.code.push(instruction(LOAD_64, HASH, STACK, -8, 0));
    }

    fn finish(mut self) -> Vec<Instruction> {
        for (at, label) in self.jumps {
            let target = self.labels.iter().find(|(known, _)| *known == label);
            let target = target.expect("each label is set").1;
            // Relative to the next instruction.
            self.code[at].offset = (target - at - 1) as i16;
        }
        self.code
    }
}

/// The program. Register 1 holds the packet at first. At the end, register 0 holds the number of
/// bytes that are accepted.
pub(super) fn program(map: i32) -> Vec<Instruction> {
    use Label::{Accept, Drop, Ipv6, Limited, Malformed, Oversized, Source};
    let mut a = Assembler::default();
    a.combine(COPY, PACKET, 1);
    a.field(A, IFINDEX);
    a.jump(IF_EQUAL, A, 0, LOOPBACK_IFINDEX, Accept);
    a.push(SET_64, MAP, MAP_VALUE, 0, map);
    a.push(0, 0, 0, 0, 0);
    a.field(LENGTH, GSO_SIZE);
    a.push(IF_OTHER, LENGTH, 0, 2, 0);
    a.field(LENGTH, LEN);
    a.set(SUBTRACT, LENGTH, UDP_HEADER);
    a.field(DATAGRAMS, GSO_SEGS);
    // 0 means one.
    a.skip_unless_zero(DATAGRAMS);
    a.set(SET, DATAGRAMS, 1);
    a.push(LOAD, A, MAP, offset_of!(Shared, maximum), 0);
    a.jump(IF_GREATER, LENGTH, A, 0, Oversized);
    // There is no first byte.
    a.jump(IF_EQUAL, LENGTH, 0, 0, Malformed);
    a.set(PACKET_8, RESULT, UDP_HEADER);
    // Twice the first byte; the verifier requires the bound.
    a.set(AND, RESULT, 0xff);
    a.combine(ADD, RESULT, RESULT);
    a.combine(ADD, RESULT, MAP);
    a.push(LOAD_16, B, RESULT, offset_of!(Shared, minimum), 0);
    a.jump(IF_GREATER, B, LENGTH, 0, Malformed);
    a.push(LOAD, A, MAP, offset_of!(Shared, limits), 0);
    a.jump(IF_EQUAL, A, 0, 0, Accept);

    // The hash of the address, or of the /64, then that of the source.
    a.push(LOAD_64, HASH, MAP, offset_of!(Shared, keys), 0);
    a.field(A, PROTOCOL);
    a.jump(IF_EQUAL, A, 0, IPV6, Ipv6);
    a.mix(PACKET_32, IPV4_SOURCE);
    a.store_hash();
    a.jump(JUMP, 0, 0, 0, Source);
    a.label(Ipv6);
    a.mix(PACKET_32, IPV6_SOURCE);
    a.mix(PACKET_32, IPV6_SOURCE + 4);
    a.store_hash();
    a.mix(PACKET_32, IPV6_SOURCE + 8);
    a.mix(PACKET_32, IPV6_SOURCE + 12);
    a.label(Source);
    a.mix(PACKET_16, SOURCE_PORT);

    // Known sources have no limit.
    a.combine(COPY, RESULT, HASH);
    a.set(SHIFT_RIGHT, RESULT, 64 - SETS.ilog2() as i32);
    a.set(SHIFT_LEFT, RESULT, (4 * WAYS).ilog2() as i32);
    a.combine(ADD, RESULT, MAP);
    a.combine(COPY_32, HASH, HASH);
    a.set(OR, HASH, 1);
    for way in 0..WAYS {
        a.push(LOAD, A, RESULT, offset_of!(Shared, known) + 4 * way, 0);
        a.jump(IF_SAME, A, HASH, 0, Accept);
    }

    // Others have the allowance of their address and this type of message.
    a.load_hash();
    a.mix(PACKET_8, UDP_HEADER);
    a.combine(COPY, RESULT, HASH);
    a.set(SHIFT_RIGHT, RESULT, 64 - GROUPS.ilog2() as i32);
    a.set(SHIFT_LEFT, RESULT, 8_u32.ilog2() as i32);
    a.combine(ADD, RESULT, MAP);
    a.push(LOAD_64, A, RESULT, offset_of!(Shared, allowance), 0);
    a.jump(IF_AT_MOST, A, 0, 0, Limited);
    a.combine(COPY, A, DATAGRAMS);
    a.combine(NEGATE, A, 0);
    a.push(ADD_TO, RESULT, A, offset_of!(Shared, allowance), 0);

    a.label(Accept);
    a.set(SET_32, RESULT, -1);
    a.combine(EXIT, 0, 0);
    a.label(Oversized);
    a.push(ADD_TO, MAP, DATAGRAMS, offset_of!(Shared, oversized), 0);
    a.jump(JUMP, 0, 0, 0, Drop);
    a.label(Malformed);
    a.push(ADD_TO, MAP, DATAGRAMS, offset_of!(Shared, malformed), 0);
    a.jump(JUMP, 0, 0, 0, Drop);
    a.label(Limited);
    a.push(ADD_TO, MAP, DATAGRAMS, offset_of!(Shared, limited), 0);
    a.label(Drop);
    a.set(SET, A, 1);
    a.push(ADD_TO, MAP, A, offset_of!(Shared, buffers), 0);
    a.set(SET, RESULT, 0);
    a.combine(EXIT, 0, 0);
    a.finish()
}
