// SPDX-License-Identifier: Apache-2.0
//! tonic, which consumers of the contract are often written with, against our servers: a line "ok - CASE" or
//! "not ok - CASE: why" for each.
//!
//!     tonic-peer client ADDRESS   the official interop cases
//!     tonic-peer relay ADDRESS    a relay: its catalog, and one whole snapshot, decoded within the default limit of 4 MiB
//!
//! INTEROP_TLS, a folder, asks for TLS: it has ca.pem, and perhaps client.pem and .key.

use std::{env, error::Error, fs, future::Future, path::PathBuf, process::ExitCode, time::Duration};

use tokio_stream::{iter, wrappers::ReceiverStream};
use tonic::{codec::CompressionEncoding, metadata::MetadataValue, transport::{Certificate, Channel, ClientTlsConfig, Identity}, Code, Request, Status};

mod testing {
    tonic::include_proto!("grpc.testing");
}
mod kvrelay {
    tonic::include_proto!("dynamo.kvrelay.v1");
}
use kvrelay::kv_event_relay_client::KvEventRelayClient;
use testing::{
    test_service_client::TestServiceClient, unimplemented_service_client::UnimplementedServiceClient, BoolValue, EchoStatus,
    Empty, Payload, ResponseParameters, SimpleRequest, StreamingInputCallRequest, StreamingOutputCallRequest,
};

type Outcome = Result<(), Box<dyn Error>>;
type Client = TestServiceClient<Channel>;

const UP: [usize; 4] = [27182, 8, 1828, 45904];
const DOWN: [usize; 4] = [31415, 9, 2653, 58979];
const SPECIAL: &str = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n";
const MARKER: u32 = 0x4b56_5231;

fn need(good: bool, what: &str) -> Outcome {
    if good { Ok(()) } else { Err(what.into()) }
}

fn status<T>(got: Result<T, Status>, code: Code, text: Option<&str>) -> Outcome {
    match got {
        Ok(_) => Err("no error".into()),
        Err(s) => need(s.code() == code && text.is_none_or(|t| t == s.message()), &format!("{s:?}")),
    }
}

fn zeros(size: usize) -> Option<Payload> {
    Some(Payload { body: vec![0; size] })
}

fn large() -> SimpleRequest {
    SimpleRequest { response_size: 314159, payload: zeros(271828), ..Default::default() }
}

fn output(up: usize, down: &[usize]) -> StreamingOutputCallRequest {
    let response_parameters = down.iter().map(|&n| ResponseParameters { size: n as i32, compressed: None }).collect();
    StreamingOutputCallRequest { response_parameters, payload: zeros(up), response_status: None }
}

async fn large_unary(mut c: Client) -> Outcome {
    let got = c.unary_call(large()).await?.into_inner().payload.unwrap_or_default().body;
    need(got == vec![0; 314159], "another body")
}

async fn empty_unary(mut c: Client) -> Outcome {
    Ok(c.empty_call(Empty {}).await.map(|_| ())?)
}

async fn client_streaming(mut c: Client) -> Outcome {
    let requests = UP.map(|n| StreamingInputCallRequest { payload: zeros(n), expect_compressed: None });
    let sum = c.streaming_input_call(iter(requests)).await?.into_inner().aggregated_payload_size;
    need(sum == 74922, "another sum")
}

async fn server_streaming(mut c: Client) -> Outcome {
    let mut answers = c.streaming_output_call(output(0, &DOWN)).await?.into_inner();
    for size in DOWN {
        let got = answers.message().await?.ok_or("too few answers")?;
        need(got.payload.unwrap_or_default().body.len() == size, "another size")?;
    }
    need(answers.message().await?.is_none(), "too many answers")
}

async fn ping_pong(mut c: Client) -> Outcome {
    let (send, requests) = tokio::sync::mpsc::channel(1);
    let mut answers = c.full_duplex_call(ReceiverStream::new(requests)).await?.into_inner();
    for (up, down) in UP.into_iter().zip(DOWN) {
        send.send(output(up, &[down])).await?;
        let got = answers.message().await?.ok_or("too few answers")?;
        need(got.payload.unwrap_or_default().body.len() == down, "another size")?;
    }
    drop(send);
    need(answers.message().await?.is_none(), "too many answers")
}

async fn empty_stream(mut c: Client) -> Outcome {
    let mut answers = c.full_duplex_call(iter([])).await?.into_inner();
    need(answers.message().await?.is_none(), "an answer")
}

async fn client_compressed_unary(c: Client) -> Outcome {
    let asking = |value| SimpleRequest { expect_compressed: Some(BoolValue { value }), ..large() };
    status(c.clone().unary_call(asking(true)).await, Code::InvalidArgument, None)?;
    c.clone().send_compressed(CompressionEncoding::Gzip).unary_call(asking(true)).await?;
    c.clone().unary_call(asking(false)).await?;
    Ok(())
}

async fn server_compressed_streaming(c: Client) -> Outcome {
    let parameters = |size, value| ResponseParameters { size, compressed: Some(BoolValue { value }) };
    for encoding in [CompressionEncoding::Gzip, CompressionEncoding::Zstd] {
        let mut request = output(0, &[]);
        request.response_parameters = vec![parameters(31415, true), parameters(92653, false)];
        let mut client = c.clone().accept_compressed(encoding);
        let mut answers = client.streaming_output_call(request).await?.into_inner();
        for size in [31415, 92653] {
            let got = answers.message().await?.ok_or("too few answers")?;
            need(got.payload.unwrap_or_default().body.len() == size, "another size")?;
        }
    }
    Ok(())
}

async fn custom_metadata(mut c: Client) -> Outcome {
    let mut request = Request::new(output(271828, &[314159]));
    drop(request.metadata_mut().insert("x-grpc-test-echo-initial", MetadataValue::from_static("test_initial_metadata_value")));
    let binary = MetadataValue::from_bytes(&[0xab, 0xab, 0xab]);
    request.metadata_mut().insert_bin("x-grpc-test-echo-trailing-bin", binary.clone());
    let request = request.map(|message| iter([message]));
    let answer = c.full_duplex_call(request).await?;
    let initial = answer.metadata().get("x-grpc-test-echo-initial").cloned();
    need(initial.is_some_and(|v| v == "test_initial_metadata_value"), "initial metadata")?;
    let mut answers = answer.into_inner();
    while answers.message().await?.is_some() {}
    let trailing = answers.trailers().await?.ok_or("no trailers")?;
    need(trailing.get_bin("x-grpc-test-echo-trailing-bin") == Some(&binary), "trailing metadata")
}

async fn echo_status(mut c: Client, text: &str) -> Outcome {
    let wish = Some(EchoStatus { code: 2, message: text.into() });
    let request = SimpleRequest { response_status: wish.clone(), ..Default::default() };
    status(c.unary_call(request).await, Code::Unknown, Some(text))?;
    let request = StreamingOutputCallRequest { response_status: wish, ..Default::default() };
    let got = match c.full_duplex_call(iter([request])).await {
        Ok(answer) => answer.into_inner().message().await,
        Err(status) => Err(status),
    };
    status(got, Code::Unknown, Some(text))
}

async fn unimplemented_service(channel: Channel) -> Outcome {
    let mut c = UnimplementedServiceClient::new(channel);
    status(c.unimplemented_call(Empty {}).await, Code::Unimplemented, None)
}

async fn unimplemented_method(mut c: Client) -> Outcome {
    status(c.unimplemented_call(Empty {}).await, Code::Unimplemented, None)
}

async fn timeout_on_sleeping_server(mut c: Client) -> Outcome {
    let (send, requests) = tokio::sync::mpsc::channel(1);
    let mut request = Request::new(ReceiverStream::new(requests));
    request.set_timeout(Duration::from_millis(1));
    send.send(output(27182, &[])).await?;
    let got = match c.full_duplex_call(request).await {
        Ok(answer) => answer.into_inner().message().await,
        Err(status) => Err(status),
    };
    // tonic's own timer ends a call with CANCELLED.
    let code = got.err().map(|s| s.code());
    need(matches!(code, Some(Code::DeadlineExceeded | Code::Cancelled)), &format!("{code:?}"))
}

async fn cancel_after_first_response(mut c: Client) -> Outcome {
    let (send, requests) = tokio::sync::mpsc::channel(1);
    let mut answers = c.full_duplex_call(ReceiverStream::new(requests)).await?.into_inner();
    send.send(output(27182, &[31415])).await?;
    need(answers.message().await?.is_some(), "no answer")?;
    drop(answers); // which resets the stream
    empty_unary(c).await
}

async fn concurrent_large_unary(c: Client) -> Outcome {
    let calls: Vec<_> = (0..1000).map(|_| tokio::spawn({
        let mut c = c.clone();
        async move { c.unary_call(large()).await.map(|answer| answer.into_inner().payload.unwrap_or_default().body.len()) }
    })).collect();
    for call in calls {
        need(call.await?? == 314159, "another size")?;
    }
    Ok(())
}

// ---- a relay ----

async fn relay_info(mut c: KvEventRelayClient<Channel>) -> Outcome {
    let info = c.get_relay_info(kvrelay::RelayInfoRequest { contract_marker: MARKER }).await?.into_inner();
    need(info.contract_marker == MARKER && info.protocol_version == 1, &format!("{info:?}"))
}

async fn relay_wrong_marker(mut c: KvEventRelayClient<Channel>) -> Outcome {
    let got = c.get_relay_info(kvrelay::RelayInfoRequest { contract_marker: 1 }).await.err().ok_or("no error")?;
    let reason = got.metadata().get("kv-relay-error-reason").cloned();
    need(got.code() == Code::FailedPrecondition, &format!("{got:?}"))?;
    need(reason.is_some_and(|r| r == "RELAY_ERROR_REASON_CONTRACT_MISMATCH"), "another reason")
}

fn word(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().rev().fold(0, |n, &b| n << 8 | u64::from(b))
}

/// Reads every pool's snapshot to its end: each chunk continues the one before, and all buckets arrive.
async fn relay_snapshots(mut c: KvEventRelayClient<Channel>) -> Outcome {
    let subscriber = "tonic".to_string();
    let request = kvrelay::WatchKvPoolCatalogRequest { subscriber_id: subscriber.clone(), contract_marker: MARKER };
    let mut catalog = c.watch_kv_pool_catalog(request).await?.into_inner();
    let pools = catalog.message().await?.ok_or("no catalog")?.snapshot.unwrap_or_default().pools;
    need(!pools.is_empty(), "no pools")?;
    for pool in pools {
        let buckets = pool.producer.as_ref().and_then(|p| p.ckf_format.as_ref()).map_or(0, |f| f.bucket_count);
        let request = kvrelay::SubscribeKvPoolRequest {
            subscriber_id: subscriber.clone(),
            expected_producer: pool.producer,
            contract_marker: MARKER,
        };
        let mut updates = c.subscribe_kv_pool(request).await?.into_inner();
        let (mut chunks, mut got) = (0, 0);
        while got < buckets {
            let update = updates.message().await?.ok_or("the stream ended")?;
            let frame = &update.payload;
            need(update.kind() == kvrelay::FilterUpdateKind::SnapshotChunk, "no chunk")?;
            need(frame.len() > 64 && &frame[..4] == b"CBI1", "no frame")?;
            let header = 4 + 2 + 2 + 1 + 1 + 2 + 8 * 4 + 4;
            need(word(frame, header, 4) == chunks && word(frame, header + 8, 8) == got, "chunk out of order")?;
            chunks += 1;
            got += (frame.len() - header - 16) as u64 / 8;
        }
        need(got == buckets, "too many buckets")?;
        println!("# {buckets} buckets in {chunks} chunks");
    }
    Ok(())
}

// ---- all of them ----

#[derive(Default)]
struct Tally {
    failed: bool,
}

impl Tally {
    async fn run(&mut self, name: &str, case: impl Future<Output = Outcome>) {
        let outcome = match tokio::time::timeout(Duration::from_secs(60), case).await {
            Ok(outcome) => outcome.map_err(|e| e.to_string()),
            Err(_) => Err("takes too long".into()),
        };
        match outcome {
            Ok(()) => println!("ok - {name}"),
            Err(why) => {
                self.failed = true;
                println!("not ok - {name}: {}", why.escape_debug());
            }
        }
    }
}

macro_rules! run {
    ($tally:ident, $client:expr, $($case:ident)*) => { $($tally.run(stringify!($case), $case($client.clone())).await;)* };
}

/// A channel to ADDRESS, as INTEROP_TLS says.
fn channel(address: &str) -> Result<Channel, Box<dyn Error>> {
    let Ok(folder) = env::var("INTEROP_TLS").map(PathBuf::from) else {
        return Ok(Channel::from_shared(format!("http://{address}"))?.connect_lazy());
    };
    let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(fs::read(folder.join("ca.pem"))?));
    if let Ok(own) = fs::read(folder.join("client.pem")) {
        tls = tls.identity(Identity::from_pem(own, fs::read(folder.join("client.key"))?));
    }
    Ok(Channel::from_shared(format!("https://{address}"))?.tls_config(tls)?.connect_lazy())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let (kind, address) = match &arguments[..] {
        [kind, address] if kind == "client" || kind == "relay" => (kind, address),
        _ => {
            eprintln!("usage: tonic-peer client|relay ADDRESS");
            return ExitCode::from(2);
        }
    };
    let channel = channel(address).expect("an address and its files");
    let mut tally = Tally::default();
    if kind == "relay" {
        let relay = KvEventRelayClient::new(channel);
        run!(tally, relay, relay_info relay_wrong_marker relay_snapshots);
    } else {
        let client = TestServiceClient::new(channel.clone());
        run!(tally, client, empty_unary large_unary client_streaming server_streaming ping_pong empty_stream);
        run!(tally, client, client_compressed_unary server_compressed_streaming custom_metadata);
        tally.run("status_code_and_message", echo_status(client.clone(), "test status message")).await;
        tally.run("special_status_message", echo_status(client.clone(), SPECIAL)).await;
        run!(tally, client, unimplemented_method timeout_on_sleeping_server cancel_after_first_response concurrent_large_unary);
        tally.run("unimplemented_service", unimplemented_service(channel)).await;
    }
    if tally.failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
