//! The protocol between a host and its compiler: modules in one direction; machine code, or a reason, in the other.

use std::io::{self, Read, Write};

use super::confinement::Confinement;

/// Exit status of a compiler that could not work; standard error gives the reason.
pub(super) const EXIT_UNABLE: u8 = 4;

/// The header before a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    /// Its size.
    pub(super) bytes: u64,
    /// CPU time that it may take, in seconds.
    pub(super) cpu_secs: u64,
}

/// The kind of body that follows a [`Reply`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Machine code and lines.
    Code,
    /// The reason why the module cannot be compiled: a sentence that starts with "it …".
    Refused,
}

/// The header before the reply to a [`Request`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) kind: Kind,
    /// The compiler exits now: too little CPU time or memory is left for another module.
    pub(super) is_last: bool,
    /// The extent to which the compiler is confined.
    pub(super) confinement: Confinement,
    /// The size of the body that follows.
    pub(super) bytes: u64,
}

impl Request {
    pub(super) fn write(self, mut to: impl Write) -> io::Result<()> {
        to.write_all(&self.bytes.to_le_bytes())?;
        to.write_all(&self.cpu_secs.to_le_bytes())
    }

    /// `None` when the host has no more modules.
    pub(super) fn read(mut from: impl Read) -> io::Result<Option<Self>> {
        let mut first = [0];
        if from.read(&mut first)? == 0 {
            return Ok(None);
        }
        let mut rest = [0; 15];
        from.read_exact(&mut rest)?;
        let mut bytes = [first[0]; 8];
        bytes[1..].copy_from_slice(&rest[..7]);
        let mut cpu_secs = [0; 8];
        cpu_secs.copy_from_slice(&rest[7..]);
        Ok(Some(Self {
            bytes: u64::from_le_bytes(bytes),
            cpu_secs: u64::from_le_bytes(cpu_secs),
        }))
    }
}

impl Reply {
    pub(super) fn write(self, mut to: impl Write) -> io::Result<()> {
        let kind = match self.kind {
            Kind::Code => b'C',
            Kind::Refused => b'R',
        };
        let confinement = match self.confinement {
            Confinement::None => b'0',
            Confinement::Partial => b'1',
            Confinement::Full => b'2',
        };
        to.write_all(&[kind, u8::from(self.is_last), confinement])?;
        to.write_all(&self.bytes.to_le_bytes())
    }

    /// # Errors
    /// Of kind `InvalidData` if it is not a reply.
    pub(super) fn read(mut from: impl Read) -> io::Result<Self> {
        let mut head = [0; 3];
        from.read_exact(&mut head)?;
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        let [kind, last, confinement] = head;
        let kind = match kind {
            b'C' => Kind::Code,
            b'R' => Kind::Refused,
            _ => return Err(invalid()),
        };
        let is_last = match last {
            0 | 1 => last == 1,
            _ => return Err(invalid()),
        };
        let confinement = match confinement {
            b'0' => Confinement::None,
            b'1' => Confinement::Partial,
            b'2' => Confinement::Full,
            _ => return Err(invalid()),
        };
        let mut bytes = [0; 8];
        from.read_exact(&mut bytes)?;
        Ok(Self {
            kind,
            is_last,
            confinement,
            bytes: u64::from_le_bytes(bytes),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip_and_the_end_reads_as_none() {
        let request = Request {
            bytes: 0x0102_0304_0506_0708,
            cpu_secs: 120,
        };
        let mut wire = Vec::new();
        request.write(&mut wire).unwrap();
        let mut from = wire.as_slice();
        assert_eq!(Request::read(&mut from).unwrap(), Some(request));
        assert_eq!(Request::read(&mut from).unwrap(), None);
        assert!(Request::read(&wire[..9]).is_err(), "cut off");

        for kind in [Kind::Code, Kind::Refused] {
            let reply = Reply {
                kind,
                is_last: kind == Kind::Refused,
                confinement: Confinement::Partial,
                bytes: 7,
            };
            let mut wire = Vec::new();
            reply.write(&mut wire).unwrap();
            assert_eq!(Reply::read(wire.as_slice()).unwrap(), reply);
        }
        let garbage = Reply::read(&b"this is not code"[..]).unwrap_err();
        assert_eq!(garbage.kind(), io::ErrorKind::InvalidData);
    }
}
