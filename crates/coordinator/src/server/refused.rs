//! JSON responses: answers and refusals.

use axum::http::header::{
    CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE,
};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use seikan_proto::mesh::{Reason, Refusal};

use super::{answers, limit};
use crate::store::StoreError;

/// A refused request: HTTP status and body.
#[derive(Debug)]
pub(super) struct Refused {
    status: StatusCode,
    refusal: Refusal,
}

impl Refused {
    /// The request violates the protocol.
    pub fn malformed(message: impl Into<String>) -> Refused {
        Refused::new(Reason::Malformed, message)
    }

    /// The source has failed too often.
    pub fn too_many() -> Refused {
        let seconds = limit::RETRY_AFTER.as_secs();
        Refused::new(
            Reason::TooMany,
            format!("too many failed attempts from this address; try again in {seconds} s"),
        )
    }

    /// The member has sent too many requests.
    pub fn too_often() -> Refused {
        let seconds = limit::RETRY_AFTER.as_secs();
        Refused::new(
            Reason::TooMany,
            format!("too many requests of one member; try again in {seconds} s"),
        )
    }

    /// Replaces the reason's usual status.
    pub fn with_status(self, status: StatusCode) -> Refused {
        Refused { status, ..self }
    }

    fn new(reason: Reason, message: impl Into<String>) -> Refused {
        Refused::from(Refusal {
            reason,
            message: message.into(),
        })
    }
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Refused {
        let status = match refusal.reason {
            Reason::Malformed => StatusCode::BAD_REQUEST,
            Reason::BadToken => StatusCode::FORBIDDEN,
            Reason::NotAMember => StatusCode::UNAUTHORIZED,
            Reason::NameTaken | Reason::KeyTaken | Reason::Full => StatusCode::CONFLICT,
            Reason::TooMany => StatusCode::TOO_MANY_REQUESTS,
            Reason::Unavailable | Reason::Other => StatusCode::SERVICE_UNAVAILABLE,
        };
        Refused { status, refusal }
    }
}

impl From<StoreError> for Refused {
    fn from(error: StoreError) -> Refused {
        error.refusal().into()
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let mut response = match serde_json::to_vec(&self.refusal) {
            Ok(body) => json(self.status, body),
            Err(_) => self.status.into_response(),
        };
        let headers = response.headers_mut();
        if self.status == StatusCode::UNAUTHORIZED {
            // RFC 6750, section 3.
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            headers.insert(RETRY_AFTER, limit::RETRY_AFTER.as_secs().into());
        }
        response
    }
}

/// Response with a body that may be long. `guard` is kept until the body has been sent.
pub(super) fn long<T: Send + 'static>(body: Box<[u8]>, guard: T) -> Response {
    let length = body.len();
    let mut response = json(StatusCode::OK, Vec::new());
    *response.body_mut() = answers::body(body, guard);
    let headers = response.headers_mut();
    headers.insert(CONTENT_LENGTH, length.into());
    response
}

/// JSON response that no proxy or client may cache.
pub(super) fn json(status: StatusCode, body: Vec<u8>) -> Response {
    let headers = [
        (CONTENT_TYPE, "application/json"),
        (CACHE_CONTROL, "no-store"),
    ];
    (status, headers, body).into_response()
}
