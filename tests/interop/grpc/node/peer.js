// SPDX-License-Identifier: Apache-2.0
//
// gRPC's official interop cases with stock @grpc/grpc-js, on either side; as peer.py:
//
//   node peer.js client ADDRESS
//   node peer.js server
//
// PROTO_TESTING names testing.proto. The modules lie in the working folder. INTEROP_TLS as there.
'use strict';
const fs = require('fs');
const path = require('path');
const modules = path.join(process.cwd(), 'node_modules');
const grpc = require(path.join(modules, '@grpc/grpc-js'));
const loader = require(path.join(modules, '@grpc/proto-loader'));
const testing = grpc.loadPackageDefinition(loader.loadSync(process.env.PROTO_TESTING, { keepCase: true, longs: Number })).grpc.testing;

const INITIAL = 'x-grpc-test-echo-initial', TRAILING = 'x-grpc-test-echo-trailing-bin';
const UP = [27182, 8, 1828, 45904], DOWN = [31415, 9, 2653, 58979];
const SPECIAL = '\t\ntest with whitespace\r\nand Unicode BMP \u263a and non-BMP \u{1F608}\t\n';
const zeros = (n) => ({ body: Buffer.alloc(n) });
const large = (more) => ({ response_size: 314159, payload: zeros(271828), ...more });
const output = (up, ...down) => ({ response_parameters: down.map((size) => ({ size })), payload: zeros(up) });

const secure = process.env.INTEROP_TLS;
const read = (name) => fs.existsSync(path.join(secure, name)) ? fs.readFileSync(path.join(secure, name)) : null;

// ---- client ----

const credentials = () => secure ? grpc.credentials.createSsl(read('ca.pem'), read('client.key'), read('client.pem'))
  : grpc.credentials.createInsecure();

function need(good, what) {
  if (!good) throw new Error(what);
}

function needStatus(error, code, text) {
  need(error && error.code === code && (text === undefined || error.details === text),
    error ? `${error.code} ${JSON.stringify(error.details)}` : 'no error');
}

// {error, answer, initial, trailing} of a call with one answer; `start` gets what to call back.
function unary(start) {
  return new Promise((resolve) => {
    const got = {};
    const call = start((error, answer) => { Object.assign(got, { error, answer }); });
    call.on('metadata', (m) => { got.initial = m; });
    call.on('status', (s) => { got.trailing = s.metadata; setImmediate(resolve, got); });
  });
}

// The same of a call with many answers; `each` is called with the number of those there are.
function collect(call, each) {
  return new Promise((resolve) => {
    const got = { sizes: [] };
    call.on('data', (m) => { got.sizes.push(m.payload ? m.payload.body.length : 0); if (each) each(got.sizes.length); });
    call.on('metadata', (m) => { got.initial = m; });
    call.on('error', (e) => { got.error = e; });
    call.on('status', (s) => { got.trailing = s.metadata; setImmediate(resolve, got); });
  });
}

function needSizes(got, sizes) {
  need(!got.error, got.error);
  need(got.sizes.join() === sizes.join(), `other sizes: ${got.sizes}`);
}

async function largeUnary(stub, more, ...rest) {
  const got = await unary((done) => stub.UnaryCall(large(more), ...rest, done));
  need(!got.error, got.error);
  need(got.answer.payload.body.length === 314159, 'another size');
}

async function echoStatus(stub, message) {
  const response_status = { code: 2, message };
  needStatus((await unary((done) => stub.UnaryCall({ response_status }, done))).error, 2, message);
  const call = stub.FullDuplexCall();
  const got = collect(call);
  call.write({ response_status });
  call.end();
  needStatus((await got).error, 2, message);
}

function echoMetadata() {
  const metadata = new grpc.Metadata();
  metadata.set(INITIAL, 'test_initial_metadata_value');
  metadata.set(TRAILING, Buffer.from('ababab', 'hex'));
  return metadata;
}

const CASES = {
  async empty_unary(stub) {
    need(!(await unary((done) => stub.EmptyCall({}, done))).error, 'an error');
  },
  async large_unary(stub) {
    await largeUnary(stub);
  },
  async client_streaming(stub) {
    const got = await unary((done) => {
      const call = stub.StreamingInputCall(done);
      UP.forEach((n) => call.write({ payload: zeros(n) }));
      call.end();
      return call;
    });
    need(!got.error && got.answer.aggregated_payload_size === 74922, 'another sum');
  },
  async server_streaming(stub) {
    needSizes(await collect(stub.StreamingOutputCall(output(0, ...DOWN))), DOWN);
  },
  async ping_pong(stub) {
    const call = stub.FullDuplexCall();
    const got = collect(call, (n) => n < UP.length ? call.write(output(UP[n], DOWN[n])) : call.end());
    call.write(output(UP[0], DOWN[0]));
    needSizes(await got, DOWN);
  },
  async empty_stream(stub) {
    const call = stub.FullDuplexCall();
    const got = collect(call);
    call.end();
    needSizes(await got, []);
  },
  async server_compressed_unary(stub) {
    await largeUnary(stub, { response_compressed: { value: true } });
    await largeUnary(stub, { response_compressed: { value: false } });
  },
  async client_compressed_unary(stub, address) {
    const refused = await unary((done) => stub.UnaryCall(large({ expect_compressed: { value: true } }), done));
    needStatus(refused.error, grpc.status.INVALID_ARGUMENT);
    const zipped = new testing.TestService(address, credentials(), { 'grpc.default_compression_algorithm': 2 });
    await largeUnary(zipped, { expect_compressed: { value: true } });
    zipped.close();
    await largeUnary(stub, { expect_compressed: { value: false } });
  },
  async custom_metadata(stub) {
    const first = await unary((done) => stub.UnaryCall(large(), echoMetadata(), done));
    const call = stub.FullDuplexCall(echoMetadata());
    const second = collect(call);
    call.write(output(271828, 314159));
    call.end();
    for (const got of [first, await second]) {
      need(!got.error, got.error);
      need(got.initial.get(INITIAL)[0] === 'test_initial_metadata_value', 'initial metadata');
      const back = got.trailing.get(TRAILING)[0];
      need(back && back.toString('hex') === 'ababab', 'trailing metadata');
    }
  },
  async status_code_and_message(stub) {
    await echoStatus(stub, 'test status message');
  },
  async special_status_message(stub) {
    await echoStatus(stub, SPECIAL);
  },
  async unimplemented_method(stub) {
    needStatus((await unary((done) => stub.UnimplementedCall({}, done))).error, grpc.status.UNIMPLEMENTED);
  },
  async unimplemented_service(_, address) {
    const stub = new testing.UnimplementedService(address, credentials());
    needStatus((await unary((done) => stub.UnimplementedCall({}, done))).error, grpc.status.UNIMPLEMENTED);
    stub.close();
  },
  async cancel_after_begin(stub) {
    const got = await unary((done) => {
      const call = stub.StreamingInputCall(done);
      call.cancel();
      return call;
    });
    needStatus(got.error, grpc.status.CANCELLED);
  },
  async cancel_after_first_response(stub) {
    const call = stub.FullDuplexCall();
    const got = collect(call, () => call.cancel());
    call.write(output(27182, 31415));
    needStatus((await got).error, grpc.status.CANCELLED);
  },
  async timeout_on_sleeping_server(stub) {
    const call = stub.FullDuplexCall({ deadline: Date.now() + 1 });
    const got = collect(call);
    call.write(output(27182));
    needStatus((await got).error, grpc.status.DEADLINE_EXCEEDED);
  },
  async concurrent_large_unary(stub) {
    await Promise.all(Array.from({ length: 1000 }, () => largeUnary(stub)));
  },
};

async function judge(address) {
  const stub = new testing.TestService(address, credentials());
  for (const [name, run] of Object.entries(CASES)) {
    let late;
    const limit = new Promise((_, reject) => { late = setTimeout(() => reject(new Error('takes too long')), 60000); });
    try {
      await Promise.race([run(stub, address), limit]);
      console.log(`ok - ${name}`);
    } catch (error) {
      process.exitCode = 1;
      console.log(`not ok - ${name}: ${JSON.stringify(String(error.message || error))}`);
    }
    clearTimeout(late);
  }
  process.exit(); // whatever a case that failed has left open
}

// ---- server ----

function echo(call) {
  const initial = new grpc.Metadata(), trailing = new grpc.Metadata();
  call.metadata.get(INITIAL).forEach((v) => initial.add(INITIAL, v));
  call.metadata.get(TRAILING).forEach((v) => trailing.add(TRAILING, v));
  call.sendMetadata(initial);
  return trailing;
}

function wished(request) {
  const s = request.response_status;
  return s && s.code ? { code: s.code, details: s.message } : null;
}

// Answers every request at once; `queue` keeps them for later.
function duplex(call, queue) {
  const trailing = echo(call);
  const serve = (request) => {
    (request.response_parameters || []).forEach((p) => call.write({ payload: zeros(p.size || 0) }));
    const error = wished(request);
    if (error) call.emit('error', { ...error, metadata: trailing });
  };
  const kept = [];
  call.on('data', (request) => queue ? kept.push(request) : serve(request));
  call.on('error', () => {});
  call.on('end', () => { kept.forEach(serve); call.end(trailing); });
}

function serverCredentials() {
  if (!secure) return grpc.ServerCredentials.createInsecure();
  const mutual = read('client.pem') !== null;
  return grpc.ServerCredentials.createSsl(mutual ? read('ca.pem') : null,
    [{ private_key: read('server.key'), cert_chain: read('server.pem') }], mutual);
}

// Calls back with the server and its port.
function start(address, done) {
  const server = new grpc.Server();
  server.addService(testing.TestService.service, {
    EmptyCall: (call, done) => done(null, {}),
    UnaryCall: (call, done) => {
      const trailing = echo(call);
      const error = wished(call.request);
      done(error, error ? null : { payload: zeros(call.request.response_size || 0) }, trailing);
    },
    StreamingOutputCall: (call) => {
      (call.request.response_parameters || []).forEach((p) => call.write({ payload: zeros(p.size || 0) }));
      call.end();
    },
    StreamingInputCall: (call, done) => {
      let sum = 0;
      call.on('data', (request) => { sum += request.payload ? request.payload.body.length : 0; });
      call.on('end', () => done(null, { aggregated_payload_size: sum }));
    },
    FullDuplexCall: (call) => duplex(call, false),
    HalfDuplexCall: (call) => duplex(call, true),
  });
  server.bindAsync(address, serverCredentials(), (error, port) => {
    if (error) throw error;
    done(server, port);
  });
}

function serve() {
  start('127.0.0.1:0', (first, port) => {
    let server = first;
    console.log(`listening 127.0.0.1:${port}`);
    process.stdin.on('data', () => { // "stop": another server takes its place
      server.tryShutdown(() => {});
      start(`127.0.0.1:${port}`, (next) => { server = next; });
    });
    process.stdin.on('end', () => process.exit(0));
  });
}

const [mode, address] = process.argv.slice(2);
if (mode === 'client' && address) judge(address);
else if (mode === 'server') serve();
else process.exitCode = 2;
