//! `wasi:sockets`: always refused. The refusal is recorded, so that the outcome can give the reason.

use wasmtime::component::{HasSelf, Linker, Resource};
use wasmtime_wasi::p2::bindings::sockets::network::{
    self, ErrorCode, IpAddress, IpAddressFamily, Network,
};
use wasmtime_wasi::p2::bindings::sockets::{ip_name_lookup, tcp_create_socket, udp_create_socket};
use wasmtime_wasi::p2::{DynPollable, SocketError, SocketResult, TcpSocket, UdpSocket};

use crate::sandbox::attempt::state::AttemptState;

const DENIAL: &str = "the handler tried to open a socket, which cannot be granted; HTTP requests can be granted \
                      (`http` in rouse.toml)";

/// Shadows the socket functions that wasmtime-wasi has linked, so that each call is refused.
pub(in crate::sandbox) fn guard_sockets(linker: &mut Linker<AttemptState>) -> wasmtime::Result<()> {
    type Myself = HasSelf<AttemptState>;
    linker.allow_shadowing(true);
    tcp_create_socket::add_to_linker::<_, Myself>(linker, |state| state)?;
    udp_create_socket::add_to_linker::<_, Myself>(linker, |state| state)?;
    ip_name_lookup::add_to_linker::<_, Myself>(linker, |state| state)?;
    linker.allow_shadowing(false);
    Ok(())
}

impl AttemptState {
    fn no_network<T>(&mut self) -> SocketResult<T> {
        self.denial = Some(DENIAL.into());
        Err(ErrorCode::AccessDenied.into())
    }
}

impl network::HostNetwork for AttemptState {
    fn drop(&mut self, network: Resource<Network>) -> wasmtime::Result<()> {
        self.table.delete(network)?;
        Ok(())
    }
}

impl network::Host for AttemptState {
    fn convert_error_code(&mut self, error: SocketError) -> wasmtime::Result<ErrorCode> {
        error.downcast()
    }

    // No stream error is a network error, because no network stream exists.
    fn network_error_code(
        &mut self,
        _: Resource<wasmtime::Error>,
    ) -> wasmtime::Result<Option<ErrorCode>> {
        Ok(None)
    }
}

impl tcp_create_socket::Host for AttemptState {
    fn create_tcp_socket(&mut self, _: IpAddressFamily) -> SocketResult<Resource<TcpSocket>> {
        self.no_network()
    }
}

impl udp_create_socket::Host for AttemptState {
    async fn create_udp_socket(&mut self, _: IpAddressFamily) -> SocketResult<Resource<UdpSocket>> {
        self.no_network()
    }
}

type Stream = Resource<ip_name_lookup::ResolveAddressStream>;

impl ip_name_lookup::Host for AttemptState {
    fn resolve_addresses(&mut self, _: Resource<Network>, _: String) -> SocketResult<Stream> {
        self.no_network()
    }
}

// No stream is ever created.
impl ip_name_lookup::HostResolveAddressStream for AttemptState {
    fn resolve_next_address(&mut self, _: Stream) -> SocketResult<Option<IpAddress>> {
        self.no_network()
    }

    fn subscribe(&mut self, stream: Stream) -> wasmtime::Result<Resource<DynPollable>> {
        Err(self.table.delete(stream).err().map_or_else(
            || wasmtime::Error::msg("no such stream exists"),
            wasmtime::Error::from,
        ))
    }

    fn drop(&mut self, stream: Stream) -> wasmtime::Result<()> {
        self.table.delete(stream)?;
        Ok(())
    }
}
