//! Purposes of functions by their names: of the kernel, of cryptographic libraries, of C and Go.
//!
//! [`stage`] searches the table from the top, so more specific names come first. A function without
//! a name gets the purpose of its module or file. [`profile`] computes shares from counts.

use seikan_observe::profile::{Function, Functions, Profile, Share, Stage};

/// Largest number of functions in each list.
const SHARES_MAX: usize = 40;

/// Names as shell patterns, separated by spaces; compared without leading underscores, without the
/// common prefixes of libraries, and without regard to case. The first list with a match counts.
///
/// Of the kernel; of OpenSSL and its descendants, libsodium, wolfSSL, mbed TLS (assembler code has
/// the same names in most), of Rust's and Go's libraries; of glibc and Go's runtime.
const FUNCTIONS: &[(Stage, &str)] = &[
    (
        Stage::Checksum,
        "csum_* do_csum *checksum* *csum *csum_* crc32*",
    ),
    (
        Stage::Crypto,
        "aes_* aesni* aesti_* aesv8_* aes aeskey* vaes* *aes_gcm* *aesgcm* *aes-gcm* *aes_ctr* *aes_hw* bsaes* vpaes* \
         gcm_* ghash* *_ghash* polyval* ctr32* ctr_*crypt* cbc_*crypt* *chacha* *salsa20* *poly1305* evp_* \
         crypto_gcm128* crypto_ctr128* crypto_cbc128* crypto_ccm128* crypto_aead_* crypto_aes_* crypto_skcipher_* \
         crypto_shash_* crypto_ahash_* *aead_*crypt* *skcipher* blake2* camellia* cmll_* sha1_* sha256_* sha512_* \
         sha*_block* sha*_transform* sha*_ni_* sha*_update md5_* hmac* bf_*crypt* bf_cbc* des_*crypt* sm4_* \
         curve25519* x25519* fe_mul* fe_sqr* ge_*mult* ecp_nistz* bn_mul* bn_sqr* ossl_*cipher* ossl_*gcm* ossl_gcm* \
         ossl_*chacha* ossl_*aes* gcry_* mbedtls_*crypt* mbedtls_aes* mbedtls_gcm* wc_*crypt* tls_*crypt* crypto/* \
         vendor/golang.org/x/crypto/* golang.org/x/crypto/* lukechampine.com/blake3* *<aes::* aes::* *ghash::* \
         *polyval::* *blake2::* *curve25519_dalek::* ring::aead* ring::*::aead* padata_* wg_packet_encrypt* \
         wg_packet_decrypt*",
    ),
    (
        Stage::Copy,
        "copy_user* rep_movs* copy_to_iter* copy_from_iter* *copy_to_user* *copy_from_user* arch_copy_* copyin \
         copyout copy_page* memcpy* memmove* *_memcpy *_memmove skb_copy* skb_splice_bits pskb_copy* \
         skb_datagram_iter* skb_store_bits copy_skb* *copy_datagram* iov_iter_* *copy_page_*_iter runtime.memmove* \
         runtime.memcpy* runtime.typedmemmove runtime.slicecopy compiler_builtins::mem*",
    ),
    (
        Stage::Schedule,
        "schedule* preempt_schedule* *_schedule_*irq try_to_wake_up* ttwu* wake_up* default_wake_function \
         autoremove_wake* pollwake* futex* do_futex* x64_sys_futex arm64_sys_futex get_futex* *spin_unlock* \
         *spin_lock* *read_lock* *write_lock* *read_unlock* *write_unlock* mutex_* rwsem_* down_read* up_read* \
         down_write* up_write* osq_lock* ep_* do_epoll* *sys_epoll* eventfd* do_poll* do_sys_poll* do_select* \
         core_sys_select* *sys_poll* *sys_ppoll* pick_*task* pick_next* pick_eevdf* put_prev_* set_next_* \
         enqueue_task* dequeue_task* enqueue_entity* dequeue_entit* update_curr* update_load* update_rq* update_se* \
         sched_* resched_* select_task_rq* select_idle* finish_task_switch* switch_to* context_switch* \
         prepare_task_switch* switch_mm* switch_fpu* load_balance* sched_balance* newidle_balance* place_entity* \
         check_preempt* wakeup_preempt* prepare_to_wait* finish_wait* add_wait_queue* remove_wait_queue* hrtimer_* \
         hrtimer*nanosleep* clock_nanosleep* reweight_* nanosleep* pthread_* lll_* sem_wait* sem_post* kick_process* \
         smp_call_function* reschedule_* call_function_single* flush_smp_call* native_smp_send_resched* x2apic_send* \
         rcu_* note_gp* workqueue* queue_work* process_one_work worker_thread kthread* psi_* cpuacct_* avg_vruntime* \
         vruntime_* thread_group_cputime* epoll_wait* epoll_pwait* poll ppoll select pselect* runtime.futex* \
         runtime.schedule runtime.findrunnable* runtime.chan* runtime.send* runtime.recv* runtime.selectgo* \
         runtime.sel* runtime.park* runtime.gopark* runtime.goready* runtime.ready* runtime.mcall* runtime.lock* \
         runtime.unlock* runtime.note* runtime.wake* runtime.startm* runtime.stopm* runtime.netpoll* runtime.epoll* \
         runtime.runq* runtime.steal* runtime.resetspinning* runtime.usleep* runtime.osyield* runtime.procyield* \
         runtime.semacquire* runtime.semrelease* runtime.execute* runtime.casgstatus* runtime.goexit* \
         runtime.newproc* runtime.gogo* runtime.mpark* runtime.sema* runtime.checktimers* runtime.pidle* \
         runtime.handoff* runtime.(*timers)* runtime/internal/syscall.epoll* internal/runtime/syscall.epoll* sync.* \
         internal/sync.* internal/poll.(*fdmutex)* chan*",
    ),
    (
        Stage::Syscall,
        "entry_syscall* syscall* do_syscall* x64_sys_* arm64_sys_* se_sys_* do_sys_* el0* invoke_syscall* \
         x64_sys_call exit_to_user_mode* ret_from_* sysret* swapgs* fdget* fget* fput* fentry* \
         srso_* retbleed_* entry_* clear_bhb* x86_indirect_thunk* *return_thunk* vfs_read* vfs_write* ksys_* \
         do_iter_* vfs_iter* do_readv* do_writev* import_iovec* import_ubuf* rw_verify_area* new_sync_* \
         security_file_permission* io_uring_* io_* read write readv writev libc_read libc_write libc_*msg* libc_send* \
         libc_recv* send sendto recv recvfrom sendmsg recvmsg sendmmsg recvmmsg ioctl kernel_vsyscall \
         runtime.entersyscall* runtime.exitsyscall* runtime.reentersyscall* runtime/internal/syscall.* \
         internal/runtime/syscall.* runtime.read* runtime.write* golang.org/x/sys/unix.* internal/poll.* sys_call*",
    ),
    (
        Stage::Memory,
        "rep_stos* memset* wmemset* runtime.memclr* kmem_cache* kmalloc* *kmalloc* kvmalloc* kfree kfree_bulk* \
         kvfree* kfree_sensitive slab_* *_slab* alloc_pages* get_page_from_freelist* free_pages* free_unref* \
         free_frozen* alloc_frozen* page_pool* page_frag* clear_page* put_page* folio_* rmqueue* get_user_pages* \
         gup_* iommu_* dma_*map* build_skb* napi_build_skb* alloc_skb* napi_alloc_skb* netdev_alloc_skb* skb_free* \
         skb_release* kfree_skb* consume_skb* napi_consume_skb* skb_page_frag* memcg_* *mem_cgroup* obj_cgroup* \
         handle_mm_fault* *page_fault* clear_user* rmap_* lru_* malloc* free cfree calloc realloc int_malloc \
         int_free* libc_malloc* libc_free* libc_calloc* tcache_* unlink_chunk* je_* mi_* tc_malloc* crypto_malloc \
         crypto_free crypto_zalloc openssl_cleanse openssl_free runtime.malloc* runtime.newobject* runtime.makeslice* \
         runtime.growslice* runtime.gc* runtime.scan* runtime.grey* runtime.bgsweep* runtime.sweep* runtime.markroot* \
         runtime.(*mheap)* runtime.(*mcache)* runtime.(*mcentral)* runtime.(*mspan)* runtime.(*gc* runtime.wbbuf* \
         runtime.heap* runtime.findobject* runtime.nextfreefast* runtime.spanof* runtime.bulkbarrier* \
         runtime.madvise* runtime.sys*alloc* runtime.deductassist*",
    ),
    (
        Stage::Network,
        "tcp_* tcp4_* tcp6_* tcpv6_* tcp_v4* ip_* ip6_* ipv4_* ipv6_* ipv6* ip4_* ip_send* udp_* udp4_* udp6_* \
         udpv6_* udplite* raw_* icmp* dev_* netif* netdev_* napi_* net_rx* net_tx* veth_* tun_* tap_* skb_* pskb_* \
         sk_* sock_* nf_* nft_* ipt_* xt_* qdisc* sch_* tbf_* fq_* codel_* htb_* netem_* pfifo* noqueue* fib_* fib4_* \
         fib6_* inet_* inet6_* inet*_lookup* rt6_* rt_* dst_* neigh_* eth_* arp_* br_* gro_* inet_gro* validate_xmit* \
         xmit_* sch_direct* process_backlog* enqueue_to_backlog* get_rps_cpu* packet_* tpacket* bpf_prog* cls_* tcf_* \
         act_* vxlan_* geneve_* gre_* ipgre_* wg_* vhost_* virtnet_* virtqueue_* vring_* vp_notify* loopback_* ovs_* \
         xdp_* xsk_* xfrm* esp_* handle_softirqs* do_softirq* run_ksoftirqd* irq_exit* flow_dissect* siphash* \
         hsiphash* lookup_*socket* sys_sendto* sys_recvfrom* sys_sendmsg* sys_recvmsg* sys_sendmmsg* sys_recvmmsg* \
         move_addr_* simple_xmit* release_sock* lock_sock* conntrack_* hash_conntrack* secpath* security_sock* \
         security_sk* miniflow_* dp_netdev* dpcls_* odp_* netdev_linux* nl_* ptr_ring* ppp_* macvlan_* ipvlan_* \
         kernel_send* kernel_recv* mld_* dql_* consume_udp* rps_* gso_* tso_*",
    ),
];

/// For a function without a name or a match: its module or file, by the beginning of that name.
const MODULES: &[(Stage, &str)] = &[
    (
        Stage::Crypto,
        "libcrypto libssl libgcrypt libsodium libmbedcrypto libwolfssl libnettle libhogweed libnss libfreebl \
         libsoftokn libbotan chacha libchacha poly1305 libpoly1305 curve25519 libcurve25519 libblake2s libaes aesni \
         aes_ ghash gcm crypto crc_t10dif sha blake2 camellia",
    ),
    (
        Stage::Network,
        "tun tap veth wireguard vxlan geneve openvswitch bridge br_netfilter nf_ nft_ xt_ ip_ ip6_ iptable x_tables \
         sch_ cls_ act_ udp_tunnel ip6_udp_tunnel vhost virtio_net net_failover ovpn macvlan ipvlan af_packet ena \
         ixgbe i40e ice mlx bnxt e1000 igb r8169 gve hv_netvsc vmxnet3 xfrm esp ppp l2tp bonding 8021q",
    ),
];

/// Prefixes of all names in a library: ring, aws-lc and its FIPS build, with a version.
const VENDORS: [&str; 4] = ["ring_core_", "aws_lc_", "boringssl_", "bssl_"];

/// Returns the purpose of a function by its symbol and by its kernel module, program or library.
pub fn stage(symbol: &str, module: &str) -> Stage {
    let symbol = symbol.to_ascii_lowercase();
    if symbol.starts_with('[') {
        return by_module(module);
    }
    let plain = symbol.trim_start_matches('_');
    let own = VENDORS.iter().find_map(|vendor| plain.strip_prefix(vendor));
    let plain = own.map_or(plain, without_version);
    let listed = FUNCTIONS.iter().find(|(_, names)| {
        let mut names = names.split_ascii_whitespace();
        names.any(|name| matches(name, plain))
    });
    match listed {
        Some((stage, _)) => *stage,
        None => by_module(module),
    }
}

/// Returns the functions with the largest shares of the program's samples, and of the machine's.
/// `None` without a sample.
pub fn profile(functions: &Functions) -> Option<Profile> {
    if functions.samples == 0 {
        return None;
    }
    let machine = if functions.machine {
        shares(functions, functions.samples, |function| function.machine)
    } else {
        Vec::new()
    };
    Some(Profile {
        samples: functions.samples,
        program: shares(functions, functions.program, |function| function.program),
        machine,
    })
}

fn shares(functions: &Functions, all: u64, samples: impl Fn(&Function) -> u64) -> Vec<Share> {
    let mut seen: Vec<&Function> = functions.functions.iter().collect();
    seen.retain(|function| samples(function) > 0);
    seen.sort_by_key(|function| std::cmp::Reverse(samples(function)));
    seen.truncate(SHARES_MAX);
    let share = |function: &&Function| Share {
        symbol: function.symbol.clone(),
        stage: stage(&function.symbol, &function.module),
        share: samples(function) as f64 / all as f64,
    };
    seen.iter().map(share).collect()
}

fn by_module(module: &str) -> Stage {
    let module = module.to_ascii_lowercase();
    let listed = MODULES.iter().find(|(_, names)| {
        names
            .split_ascii_whitespace()
            .any(|name| module.starts_with(name))
    });
    listed.map_or(Stage::Other, |(stage, _)| *stage)
}

/// `0_17_14__chacha20_poly1305_seal` without the version.
fn without_version(symbol: &str) -> &str {
    let symbol = symbol.trim_start_matches("fips_");
    symbol.trim_start_matches(|c: char| c.is_ascii_digit() || c == '_')
}

/// Whether a name matches a pattern with stars.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let (middle, tail) = rest.rsplit_once('*').unwrap_or(("", rest));
    let inside = name
        .strip_prefix(head)
        .and_then(|name| name.strip_suffix(tail));
    let Some(mut inside) = inside else {
        return false;
    };
    middle.split('*').all(|part| match inside.find(part) {
        Some(at) => {
            inside = &inside[at + part.len()..];
            true
        }
        None => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_all(expected: Stage, module: &str, symbols: &str) {
        for symbol in symbols.split_ascii_whitespace() {
            assert_eq!(stage(symbol, module), expected, "{symbol} of {module}");
        }
    }

    #[test]
    fn ciphers_are_crypto() {
        let kernel = "chacha_4block_xor_avx512vl chacha_block_generic poly1305_blocks_avx2 poly1305_update aes_gcm_enc_update_vaes_avx10_512 \
             aesni_encrypt __aes_encrypt crypto_aes_encrypt gcm_ghash_avx ghash_setkey_pclmul blake2s_compress_avx512 \
             curve25519_generic sha256_transform_rorx vaes_gcm";
        assert_all(Stage::Crypto, "kernel", kernel);
        let openssl = "aesni_gcm_encrypt aesni_ctr32_encrypt_blocks ossl_vaes_vpclmulqdq_encrypt_avx512 gcm_ghash_vpclmulqdq_avx \
             gcm_gmult_avx ChaCha20_avx512 chacha20_poly1305_seal_avx2 poly1305_blocks_avx2 EVP_EncryptUpdate CRYPTO_gcm128_encrypt_ctr32 \
             sha256_block_data_order_shaext sha1_block_data_order_avx2 Camellia_cbc_encrypt aes_hw_ctr32_encrypt_blocks bsaes_cbc_encrypt";
        assert_all(Stage::Crypto, "libcrypto.so.3", openssl);
        let rust = "ring_core_0_17_14__chacha20_poly1305_seal_avx2 aws_lc_0_32_0_aes_gcm_encrypt_avx512 aws_lc_fips_0_13_7_aesni_gcm_encrypt \
             chacha20::backends::avx2::inner ring::aead::chacha20_poly1305::seal_in_place seikan_sys::profile::tests::chacha20_test_block";
        assert_all(Stage::Crypto, "seikan", rust);
        let go = "golang.org/x/crypto/chacha20poly1305.chacha20Poly1305Seal crypto/aes.gcmAesEnc crypto/internal/fips140/aes/gcm.gcmAesEnc \
             vendor/golang.org/x/crypto/chacha20.xorKeyStreamVX golang.org/x/crypto/poly1305.update";
        assert_all(Stage::Crypto, "wireguard-go", go);
    }

    #[test]
    fn copies_are_copy() {
        let kernel = "rep_movs_alternative copy_user_generic_unrolled _copy_to_iter _copy_from_iter copyin memcpy __memcpy memmove \
             skb_copy_datagram_iter skb_copy_bits __arch_copy_to_user";
        assert_all(Stage::Copy, "kernel", kernel);
        assert_all(
            Stage::Copy,
            "libc.so.6",
            "__memmove_avx512_unaligned_erms __memcpy_avx_unaligned",
        );
        assert_all(Stage::Copy, "nebula", "runtime.memmove");
    }

    #[test]
    fn sums_are_checksum_also_of_packets() {
        let kernel = "csum_partial do_csum __skb_checksum skb_checksum_help csum_partial_copy_generic udp4_hwcsum ip_fast_csum csum_and_copy_from_iter_full";
        assert_all(Stage::Checksum, "kernel", kernel);
        assert_all(
            Stage::Checksum,
            "boringtun",
            "gvisor.dev/gvisor/pkg/tcpip/checksum.Checksum golang.zx2c4.com/wireguard/tun.checksumNoFold",
        );
    }

    #[test]
    fn entry_into_the_kernel_is_syscall() {
        let kernel = "entry_SYSCALL_64_after_hwframe entry_SYSCALL_64 do_syscall_64 syscall_return_via_sysret syscall_exit_to_user_mode \
             __x64_sys_sendmmsg x64_sys_call __x64_sys_read el0_svc";
        assert_all(Stage::Syscall, "kernel", kernel);
        assert_all(
            Stage::Syscall,
            "nebula",
            "internal/runtime/syscall.Syscall6 runtime.entersyscall runtime.exitsyscall syscall.Syscall",
        );
    }

    #[test]
    fn waking_and_waiting_is_schedule() {
        let kernel = "schedule __schedule try_to_wake_up ttwu_queue_wakelist futex_wake do_futex __x64_sys_futex _raw_spin_unlock_irqrestore \
             native_queued_spin_lock_slowpath ep_poll ep_poll_callback pick_next_task_fair finish_task_switch dequeue_entities \
             __wake_up_common update_curr";
        assert_all(Stage::Schedule, "kernel", kernel);
        let go = "runtime.futex runtime.schedule runtime.findRunnable runtime.chansend runtime.chanrecv runtime.selectgo runtime.lock2 runtime.netpoll \
             runtime.(*timers).check sync.(*Mutex).Lock";
        assert_all(Stage::Schedule, "wireguard-go", go);
    }

    #[test]
    fn the_stack_is_network() {
        let kernel = "tcp_sendmsg_locked __tcp_transmit_skb ip_queue_xmit ip_rcv udp_sendmsg udpv6_rcv __dev_queue_xmit __netif_receive_skb_core \
             napi_gro_receive veth_xmit tun_get_user tun_do_read skb_segment nf_hook_slow sch_direct_xmit __qdisc_run fib_table_lookup \
             inet_gro_receive process_backlog br_handle_frame handle_softirqs bpf_prog_6deef7357e7b4530";
        assert_all(Stage::Network, "kernel", kernel);
    }

    #[test]
    fn memory_of_packets_is_memory() {
        let kernel = "kmem_cache_free kmem_cache_alloc_node_noprof __alloc_pages_noprof __alloc_frozen_pages_noprof kfree page_pool_alloc_pages clear_page_erms \
             __alloc_skb skb_release_data kmalloc_reserve memset_orig";
        assert_all(Stage::Memory, "kernel", kernel);
        assert_all(
            Stage::Memory,
            "libc.so.6",
            "malloc free _int_malloc _int_free cfree",
        );
        assert_all(
            Stage::Memory,
            "nebula",
            "runtime.mallocgc runtime.gcDrain runtime.scanobject runtime.(*mspan).nextFreeIndex",
        );
    }

    #[test]
    fn a_programs_own_functions_are_other() {
        let own = "main main.main boringtun::noise::Tunn::encapsulate seikan_node::worker::run process_ip_p2p multi_process_incoming_link \
             github.com/slackhq/nebula.(*Interface).consumeInsidePacket description_read formatted";
        assert_all(Stage::Other, "program", own);
        assert_eq!(stage("", ""), Stage::Other);
    }

    #[test]
    fn a_function_without_a_name_has_the_stage_of_its_file() {
        assert_eq!(stage("[libcrypto.so.3]", "libcrypto.so.3"), Stage::Crypto);
        assert_eq!(stage("ERR_clear_error", "libcrypto.so.3"), Stage::Crypto);
        assert_eq!(stage("CRYPTO_malloc", "libcrypto.so.3"), Stage::Memory);
        assert_eq!(stage("encrypt_packet", "wireguard"), Stage::Network);
        assert_eq!(stage("[openvpn]", "openvpn"), Stage::Other);
        assert_eq!(stage("[kernel]", "kernel"), Stage::Other);
    }

    #[test]
    fn patterns_can_match_at_all() {
        let all = FUNCTIONS.iter().chain(MODULES);
        for pattern in all.flat_map(|(_, names)| names.split_ascii_whitespace()) {
            assert_eq!(pattern, pattern.to_ascii_lowercase());
            assert!(!pattern.starts_with('_'), "{pattern}");
            let few = ["*", "**", "a*", "s*"];
            assert!(pattern.len() >= 2 && !few.contains(&pattern), "{pattern}");
        }
    }

    #[test]
    fn stars_stand_for_anything() {
        assert!(matches("sha*_block*", "sha256_block_data_order"));
        assert!(matches("*aead_*crypt*", "rfc7539_aead_do_encrypt_x"));
        assert!(!matches("ab*ba", "aba"));
        assert!(!matches("read", "thread") && !matches("read*", "thread"));
    }

    #[test]
    fn shares_are_of_the_programs_and_of_the_machines_own_samples() {
        let function = |symbol: &str, program, machine| Function {
            symbol: symbol.into(),
            module: "kernel".into(),
            program,
            machine,
        };
        let functions = Functions {
            samples: 100,
            program: 40,
            machine: true,
            functions: vec![
                function("tcp_ack", 10, 60),
                function("csum_partial", 30, 30),
                function("jbd2_commit", 0, 10),
            ],
            ..Functions::default()
        };
        let profile = profile(&functions).expect("samples");
        let first = |shares: &[Share]| (shares[0].symbol.clone(), shares[0].stage, shares[0].share);
        assert_eq!(profile.program.len(), 2);
        assert_eq!(
            first(&profile.program),
            ("csum_partial".into(), Stage::Checksum, 0.75)
        );
        assert_eq!(
            first(&profile.machine),
            ("tcp_ack".into(), Stage::Network, 0.6)
        );
        assert_eq!(profile.machine.len(), 3);
    }

    #[test]
    fn a_machine_that_was_not_sampled_has_no_shares() {
        let functions = Functions {
            samples: 1,
            program: 1,
            functions: vec![Function {
                symbol: "main".into(),
                module: "a".into(),
                program: 1,
                machine: 1,
            }],
            ..Functions::default()
        };
        let some = profile(&functions).expect("samples");
        assert_eq!((some.program.len(), some.machine.len()), (1, 0));
        assert_eq!(profile(&Functions::default()), None);
    }
}
