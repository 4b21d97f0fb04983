use super::*;

const OPERATOR: &str = "operator-token-0123";
const VIEWER: &str = "viewer-token-0123456";
const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

fn access(tokens: &[&str], address: &str, is_own: bool) -> Access {
    let token = |name: &str| tokens.contains(&name).then(|| Token::new(name).unwrap());
    let tokens = Tokens {
        viewer: token(VIEWER),
        operator: token(OPERATOR),
    };
    Access::new(tokens, None, address.parse().unwrap(), is_own)
}

fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
        headers.append(name, value.parse().unwrap());
    }
    headers
}

fn role(access: &Access, pairs: &[(&str, &str)]) -> Result<Role, Refused> {
    let user = access.user(&Method::GET, &headers(pairs), false);
    user.map(|user| user.role)
}

#[test]
fn without_tokens_this_machine_reads_and_changes_only_its_own_host() {
    let here = [("host", "localhost:8420")];
    let own = access(&[], "127.0.0.1:1", true);
    assert_eq!(role(&own, &here), Ok(Role::Operator));
    let served = access(&[], "127.0.0.1:1", false);
    assert_eq!(role(&served, &here), Ok(Role::Viewer));
    let open = access(&[], "0.0.0.0:1", false);
    assert_eq!(
        role(&open, &[("host", "jobs.example")]),
        Ok(Role::Anonymous)
    );
    for foreign in [
        &[("host", "evil.example")][..],
        &[("host", "localhost"), ("x-forwarded-for", "1.2.3.4")],
    ] {
        assert!(
            matches!(role(&own, foreign), Err(Refused::Foreign(_))),
            "{foreign:?}"
        );
        // With a token, such a page has to sign in.
        let token = access(&[OPERATOR], "127.0.0.1:1", true);
        assert_eq!(role(&token, foreign), Err(Refused::SignIn), "{foreign:?}");
    }
}

#[test]
fn a_token_gives_a_cookie_and_the_cookie_a_role() {
    let access = access(&[OPERATOR, VIEWER], "0.0.0.0:1", false);
    let host = ("host", "jobs.example");
    assert_eq!(role(&access, &[host]), Err(Refused::SignIn));
    assert_eq!(access.sign_in(CLIENT, "wrong", "/ui", false), Ok(None));
    for (token, wanted) in [(OPERATOR, Role::Operator), (VIEWER, Role::Viewer)] {
        let cookie = access.sign_in(CLIENT, token, "/ui", true).unwrap().unwrap();
        let text = cookie.to_str().unwrap();
        assert!(text.contains("HttpOnly; SameSite=Lax; Secure") && text.contains("Path=/ui"));
        let pair = text.split(';').next().unwrap();
        assert_eq!(role(&access, &[host, ("cookie", pair)]), Ok(wanted));
        let forged = pair.replace("viewer", "operator");
        if forged != pair {
            assert_eq!(
                role(&access, &[host, ("cookie", &forged)]),
                Err(Refused::SignIn)
            );
        }
    }
}

/// A user who knows all tokens can derive the key of the cookies.
#[test]
fn a_viewer_cannot_forge_the_session_or_the_form_of_an_operator() {
    let proxy = || Proxy {
        user_header: HeaderName::from_static("x-user"),
        operators: vec!["ada".into()],
    };
    let tokens = || {
        let mut tokens = Tokens::default();
        tokens.viewer = access(&[VIEWER], "0.0.0.0:1", false).tokens.viewer;
        tokens
    };
    let address = "0.0.0.0:1".parse().unwrap();
    let of_viewer = Access::new(tokens(), None, address, false);
    let cookie = |role| {
        let what = format!("{role}.9999999999.x");
        let signature = of_viewer.signature("session", &what);
        format!("{SESSION_COOKIE}={what}.{signature}")
    };
    let here = Access::new(tokens(), Some(proxy()), address, false);
    let host = ("host", "jobs.example");
    assert_eq!(
        role(&here, &[host, ("cookie", &cookie("viewer"))]),
        Ok(Role::Viewer)
    );
    assert!(role(&here, &[host, ("cookie", &cookie("operator"))]).is_err());
    let ada = User {
        role: Role::Operator,
        name: "ada".into(),
        ..User::default()
    };
    assert!(here.is_form_of(&ada, &here.form_token(&ada)));
    assert!(!here.is_form_of(&ada, &of_viewer.form_token(&ada)));
}

#[test]
fn a_sign_in_ends_after_12_hours_and_is_valid_on_hosts_with_the_same_tokens() {
    let here = access(&[OPERATOR, VIEWER], "0.0.0.0:1", false);
    let cookie = here.sign_in(CLIENT, VIEWER, "/ui", false).unwrap().unwrap();
    let pair = cookie.to_str().unwrap().split(';').next().unwrap();
    let headers = headers(&[("cookie", pair)]);
    let hours = |hours: u64| now() + hours * 3600;
    assert!(here.session(&headers, hours(11)).is_some());
    assert!(here.session(&headers, hours(13)).is_none());
    let same = access(&[OPERATOR, VIEWER], "10.0.0.1:1", false);
    assert!(same.session(&headers, now()).is_some());
    let new_tokens = access(&[VIEWER], "0.0.0.0:1", false);
    assert!(new_tokens.session(&headers, now()).is_none());
}

#[test]
fn sign_ins_of_an_address_are_limited() {
    let access = access(&[OPERATOR], "0.0.0.0:1", false);
    let tries = (0..100).map(|_| access.sign_in(CLIENT, "wrong", "/ui", false));
    assert!(tries.filter(Result::is_err).count() >= 89);
    let other = IpAddr::from([192, 0, 2, 2]);
    let signed_in = access.sign_in(other, OPERATOR, "/ui", false);
    assert!(signed_in.is_ok_and(|cookie| cookie.is_some()));
}

#[test]
fn forms_need_their_token_and_the_origin_of_the_page() {
    let access = access(&[], "127.0.0.1:1", true);
    let here = ("host", "localhost:1");
    let post = |pairs: &[(&str, &str)]| access.user(&Method::POST, &headers(pairs), false);
    let user = post(&[here, ("sec-fetch-site", "same-origin")]).unwrap();
    assert!(post(&[here, ("origin", "http://localhost:1")]).is_ok());
    for foreign in [
        &[here][..],
        &[here, ("sec-fetch-site", "cross-site")],
        &[here, ("origin", "http://evil.example")],
        &[here, ("origin", "null")],
    ] {
        assert!(post(foreign).is_err(), "{foreign:?}");
    }
    assert!(access.is_form_of(&user, &access.form_token(&user)));
    assert!(!access.is_form_of(&user, "") && !access.is_form_of(&user, "x"));
    let viewer = User {
        role: Role::Viewer,
        ..User::default()
    };
    assert!(!access.is_form_of(&viewer, &access.form_token(&user)));
}

#[test]
fn a_trusted_proxy_names_the_user() {
    let proxy = Proxy {
        user_header: HeaderName::from_static("x-user"),
        operators: vec!["ada".into()],
    };
    let access = Access::new(
        Tokens::default(),
        Some(proxy),
        "10.0.0.1:1".parse().unwrap(),
        false,
    );
    let host = ("host", "jobs.example");
    assert_eq!(
        role(&access, &[host, ("x-user", "ada")]),
        Ok(Role::Operator)
    );
    assert_eq!(role(&access, &[host, ("x-user", "bob")]), Ok(Role::Viewer));
    assert_eq!(role(&access, &[host]), Err(Refused::Unnamed));
    let two = [host, ("x-user", "bob"), ("x-user", "ada")];
    assert_eq!(role(&access, &two), Err(Refused::Unnamed));
}

/// The name of a page can be made to resolve to this machine (DNS rebinding), and then the page can send any header.
#[test]
fn on_loopback_a_page_cannot_send_the_header_of_the_proxy() {
    let proxy = || Proxy {
        user_header: HeaderName::from_static("x-user"),
        operators: vec!["ada".into()],
    };
    let at = |address: &str| {
        let address = address.parse().unwrap();
        Access::new(Tokens::default(), Some(proxy()), address, false)
    };
    let as_ada = |access: &Access, host| role(access, &[("host", host), ("x-user", "ada")]);
    let here = at("127.0.0.1:8420");
    for through_the_proxy in [
        "jobs.example",
        "jobs.example:8443",
        "127.0.0.1:8420",
        "localhost:8420",
    ] {
        assert_eq!(as_ada(&here, through_the_proxy), Ok(Role::Operator));
    }
    let page = as_ada(&here, "evil.example:8420");
    assert!(matches!(page, Err(Refused::Foreign(_))), "{page:?}");
    let page = as_ada(&at("[::1]:80"), "evil.example");
    assert!(matches!(page, Err(Refused::Foreign(_))), "{page:?}");
    let elsewhere = at("10.0.0.1:8420");
    assert_eq!(as_ada(&elsewhere, "jobs.example:8420"), Ok(Role::Operator));
}

#[test]
fn a_notice_comes_back_only_with_its_signature() {
    let access = access(&[], "127.0.0.1:1", true);
    let notice = Notice {
        tone: Tone::Good,
        text: "Job 7 ist ümlaut; ok".into(),
    };
    let cookie = access.notice_cookie(&notice, "/ui");
    let pair = cookie
        .to_str()
        .unwrap()
        .split(';')
        .next()
        .unwrap()
        .to_owned();
    let read = |cookie: &str| access.notice(&headers(&[("cookie", cookie)]));
    assert_eq!(read(&pair).unwrap().text, notice.text);
    assert!(read(&pair.replace("good", "bad")).is_none());
}
